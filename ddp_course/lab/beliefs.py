"""Common wrong guesses: {question: {guess: why it is wrong}}.

A guess (least, most) stands for any number in between. `Prediction.compare` prints the
reason to a reader who made the guess, unless the guess is nearly right.
"""

Guess = float | tuple[float, float]

BELIEFS: dict[str, dict[Guess, str]] = {
    # chapter 00: a gradient has as many numbers as the model, 1,038,240
    "Numbers handed over by each process in a step": {
        259_560: "With a quarter of the rows the gradient has as many numbers.",
        49: "That is the number of tensors, and each has many numbers.",
        1: "A mean loss would not do: each parameter needs the mean of its gradients.",
    },
    # chapter 01: 1 * 6 + 2
    "The rank of local_rank 2 on node 1 (of 2 x 6)": {
        5: "That is so if ranks are dealt out like cards, one to each node in turn.",
        6: "So it is in the picture, where a node has four ranks.",
        9: "But nodes and ranks are counted from 0.",
    },
    # chapter 02
    "Seconds that rank 0 spends in `send`": {
        0: "A send may wait for its receiver, however little it sends.",
    },
    "Messages that rank 0 sends": {
        7: "That is the naive way, in seven steps.",
        1: "Then rank 0 is idle while others serve, and three steps are not enough.",
    },
    "Bytes that each rank sends in an all-gather": {
        4_000: "But three ranks need the numbers, or each passes on others' numbers.",
        16_000: "Each rank has 16,000 bytes afterwards, but had a quarter before.",
    },
    # chapter 03: 2 (N - 1) / N of S = 4,152,960 bytes
    "Bytes that the busiest of four ranks sends": {
        3_114_720: "That is the first half: the sums must also get to all ranks.",
        4_152_960: "All ranks' numbers must be collected, and the sums sent out again.",
        8_305_920: "In each of the two halves, one chunk of four need not be sent.",
        12_458_880: "That is the naive way: all of it to each of the three others.",
    },
    # chapter 04: 14 S through replica 0, and 1.75 S to and 1.75 S from a rank of DDP
    "Speed-up by two threads, many tiny operations": {
        (1.5, 2): "Two threads of one process take turns: one at a time has the lock.",
    },
    "DP's replica 0 against a rank of DDP, 8 replicas": {
        1: "In all, DDP sends as much; but DP's bytes all pass one replica.",
        7: "An all-reduce sends 1.75 S and receives as much, not S each.",
        8: "Seven copies out, seven gradients in; but a rank of DDP receives, too.",
    },
    # chapter 05
    "From the beginning of backward to averaged gradients": {
        (0, 115): "The last bucket is complete only when backward has ended.",
        190: "That is backward, then all messages, with nothing hidden.",
    },
    # chapter 06
    "Memory at the worst moment of a step": {
        4_152_960: "That is the model alone.",
        8_305_920: "The optimizer's two states and the activations are missing.",
        16_611_840: "16 bytes per parameter are right; the activations come on top.",
    },
    # chapter 07: a reduce-scatter of gradients, an all-gather of parameters
    "Sent by each of four ranks in a step of ZeRO-1": {
        0.375: "A rank updates a quarter, but has gradients for all others' quarters.",
        0.75: "That is one half: gradients go out; updated parameters must come back.",
        2.25: "No rank needs more of the summed gradients than its own quarter.",
    },
    # chapter 08: three passes of 0.75 S
    "What a rank sends in a step of stage 3": {
        1.5: "But the weights are gathered twice: for forward, and for backward.",
        3: "There are three passes; in each, a rank sends three quarters of S.",
    },
    "The fullest moment of stage 3": {
        4: "A quarter of the 16; there are also whole units, and the activations.",
        5.25: "A quarter of all; but activations are not sharded, and a unit is whole "
        "while it computes.",
    },
    # chapter 09
    "Share of a step in which a rank is idle": {
        0: "Each rank needs the result of the rank before it: they take turns.",
        25: "That is the share in which a rank works.",
        50: "Forward and backward alike go through one rank at a time.",
    },
    "All-reduces for each block and step": {
        2: "That is forward; backward has as many.",
        8: "Columns, then rows: between the two matrices nothing is exchanged.",
    },
    # chapter 10: 3 / (8 + 3) of the time; 8 x 64 x 144 floats, in two directions
    "The time that a rank waits": {
        0: "The last stage waits for the first activations, the first for a gradient.",
        37.5: "That is waiting over working; a rank works in 8 of 11 slots.",
        75: "That is a whole batch; microbatches let several ranks work at once.",
    },
    "What rank 1 sends in a step": {
        294_912: "That is one direction: activations go on, and gradients go back.",
        4_718_592: "All eight microbatches together are one batch.",
    },
    # chapter 11
    "The bubble of 1F1B": {
        (0, 24): "Filling and emptying the pipeline takes as long as with GPipe.",
    },
    "What rank 0 keeps at most with 1F1B": {
        1: "That is the last rank's; rank 0 begins four before the first comes back.",
        8: "That is GPipe's: here a backward frees one before the next forward begins.",
    },
    # chapter 12: 2 ** 8, and 2 (N - 1) / N of S
    "The sum of 1,024 ones in bfloat16": {
        1_024: "bfloat16 has the number 1,024, but not 257, which the sum must pass.",
        128: "At 128 the neighbours are 1 apart: one more still fits.",
        512: "At 256 the neighbours are 2 apart already: a 1 is rounded away.",
    },
    "Sent in a step of DDP with autocast": {
        0.75: "Products are in 16 bits; the gradients of float32 weights are not.",
        1: "Numbers are collected, and sums sent out again: 2 (N - 1) / N of S.",
        2: "In each of the two halves, one chunk of N need not be sent.",
    },
    # chapter 13: (1 / 0.1 + 1 / 0.1 + 1 / 0.4) / (3 / 0.4); 3 x 2 x 4,152,960 bytes
    "Gradients used asynchronously, for each one synchronously": {
        1: "The two fast workers need not wait for rank 3 any more.",
        4: "Two of the three are four times as fast; rank 3 is as slow as before.",
    },
    "Through the link of a server with three workers": {
        8_305_920: "That is one worker; all three meet at the same server.",
        12_458_880: "Weights go out to three workers, and gradients come back.",
        5_537_280: "That is what each rank sends in a ring of three.",
    },
    # chapter 14: 3 x 8 bytes x d / 100 against 2 x 3 / 4 x 4 d; 4 of 144 products
    "The largest 1 % of four ranks, against DDP's bytes": {
        1: "Indices are sent, too; and every rank gets all ranks' numbers.",
        2: "That would be so if an all-reduce could add the numbers on the way.",
        3: "DDP's ring, too, sends less than two gradients: 1.5 with four ranks.",
    },
    "Of a layer's gradient, in the nearest matrix of rank 4": {
        (2, 7): "That is so for random numbers; but the tokens of a batch are alike.",
        24: "That is the share of the largest numbers, if as many are sent.",
    },
    # chapter 15: 8 of backward, 3 of one gradient, 4 of forward; fast links hide all
    "A step in the best order of its gradients": {
        12: "That is only computing: nothing can hide layer 0's gradient.",
        17: "That is with whole gradients: a send that has begun is not interrupted.",
    },
    "What the best order saves on faster links": {
        1: "Layer 0's gradient is sent between backward and forward, in any order.",
        3: "Backward already hides all sends but one; there is nothing left to hide.",
    },
    # chapter 16: nearly 2 - 1/N; ring and gather bring all keys to all ranks
    "The busiest of four ranks, over the mean": {
        1: "Equal parts are not equal work: position i looks at i + 1 positions.",
    },
    "Forward, bytes that a ring sends over a gather's": {
        (0.25, 0.5): "Each rank's keys still reach every other rank, once.",
    },
    # chapter 17: measured, nearly the most possible; k / R
    "Choices of the busiest of 8 experts, k = 2": {
        12.5: "Nothing keeps the router fair, and chosen experts learn more.",
        100: "A token's two experts are different ones: one has half of the choices.",
    },
    "Sent by an all-to-all, over what a gather sends": {
        0.25: "Each token goes to two experts, not to one.",
        1: "A gather sends each token to all four ranks; it needs two experts.",
        (0.33, 0.34): "That is one expert for each token; it has two.",
    },
    # chapter 18: 1 + 2 x 4 x 144 x 1,024 / 1,009,152
    "FLOPs of a token at 1,024 characters, over 6 N": {
        1: "That is all matrices; but each position is compared with 1,024 others.",
        (1.05, 1.1): "That is with 64 characters; attention grows with their number.",
    },
    "Of its GPUs' FLOP/s Llama 3 405B used, in percent": {
        (90, 100): "No product reaches that, and a step is not only products.",
        (75, 85): "Large products alone reach that; a step also waits and sends.",
    },
    # chapter 19: 50,700 hours / 16,384; the square root of 2 x 1 x 186 minutes
    "Hours between two failures of 16,384 GPUs": {
        50_700: "That is one GPU's; a failure of any of the 16,384 stops the training.",
        (24, 170): "One failure stops all; 16,384 GPUs have 16,384 times the rate.",
    },
    "Best minutes of work between saves of one minute": {
        (1, 5): "Then a sixth of the time or more goes into saves.",
        (60, 180): "Then a failure, every three hours, loses half an hour or more.",
    },
}
