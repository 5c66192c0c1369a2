"""Floor 2: context parallelism: several ranks share every sequence.

Read the modules in this order:

    naive           attention with all keys and values gathered
    ulysses         attention with all positions of some heads
    online_softmax  attention over blocks of keys, merged exactly
    ring            keys and values pass around a ring of ranks
    assignment      which rank has which positions: contiguous, zigzag, striped
    gpt             `context_parallel`: the course's GPT over a divided sequence
    checks          raise unless the ranks of a sequence have the same tokens
    recorded        parts of `ring` that record its steps, or replace them by sleep
    pytorch         PyTorch's own ring attention on the CPU, to compare with
    axis            what `parallelize` calls to divide a model's sequences
"""
