"""Mutants of solutions that their judges accept, each with the reason why it is right.

A key is (exercise, the beginning of what was changed). Whoever changes a solution finds
here what is no longer a mutant of it: the whole run of `test_mutants.py` says so.
"""

ORDER = "the order does not matter"
COMMUTES = "max and min take their arguments in any order"
IMAGINED = "where GPUs are imagined, the branch without them is not taken"
MEET = "a real GPU refuses tensors of two devices, an imagined one cannot"

SURVIVORS = {
    ("my_staleness", "0 -> "): "only differences of versions count",
    ("my_pieces", "max(begin, start) -> max(start, begin)"): COMMUTES,
    ("my_pieces", "min(end, start + numel) -> min(start + numel, end)"): COMMUTES,
    ("my_priority", "0 -> -1"): "then the link waits until the first layer is there",
    ("my_priority", "min(piece, left[layer]) -> min(left[layer], piece)"): COMMUTES,
    ("my_priority", "for k, rest in enumerate(left) if rest -> "): "of all, the least",
    ("my_least_time", "for c in range(len(send)) -> "): ORDER,
    ("my_least_time", "send -> "): "the three lists are equally long",
    ("from_bits", "sign == '1' -> sign >= '1'"): "a sign is 0 or 1",
    ("master_step", "for parameter, master in "): ORDER,
    ("next_scale", "clean + 1 == interval -> clean + 1 >= interval"): "a count is "
    "never above the interval",
    ("my_outer_step", "for own, others, velocity in "): ORDER,
    ("swap", "dist.get_rank() < peer -> dist.get_rank() <= peer"): "no rank is its own "
    "peer",
    ("swap", "dist.get_rank() < peer -> dist.get_rank() > peer"): "exactly one of two "
    "sends first, too",
    ("my_broadcast", "1 -> 2 "): "for one rank it is a step in which nobody sends",
    ("my_broadcast", "distance < n -> "): "a step more, in which nobody sends",
    ("my_transpose", "block.contiguous() -> block"): "gloo sends strided blocks of a "
    "list; other backends may refuse them",
    ("my_transpose", "for block in for_each -> "): "all blocks have one shape",
    ("clip_shards", "for shard in shards: "): ORDER,
    ("sharded_step", "mine.clone() -> mine"): "the part lies where it is gathered to",
    ("agreed_step", "for gradient in gradients: "): ORDER,
    ("agreed_step", "for gradient in gradients -> "): ORDER,
    ("agreed_step", "for weight, gradient in "): ORDER,
    (
        "agreed_step",
        "float(squares.sqrt()) -> squares.sqrt()",
    ): "a tensor of one number",
    ("agreed_step", "min(1.0, max_norm / norm) -> min(max_norm / norm, 1.0)"): COMMUTES,
    ("agreed_step", "1.0 -> "): "without a norm there is nothing to scale",
    ("my_topk_mean", "for where, what in "): ORDER,
    ("my_topk_mean", "for _ in range(n) -> "): "only their number counts",
    ("my_topk_mean", "torch.empty_like(flat[mine]) -> flat[mine]"): "what is in a "
    "tensor before it receives does not matter",
    ("my_late_steps", "for p in "): ORDER,
    ("my_late_steps", "for handle in handles"): ORDER,
    ("place_weights", "0 -> -1"): "any W that is due may come; the newest does, too",
    ("who_waits", "for rank, row in "): ORDER,
    ("who_waits", "for r, row in "): ORDER,
    ("who_waits", "for row in rows -> "): ORDER,
    ("who_waits", "for action in row -> "): ORDER,
    ("who_waits", "op == 'F' -> op >= 'F'"): "an op is F or B",
    ("who_waits", "stage == last -> stage >= last"): "no stage comes after the last",
    ("my_bucket_plan", "id(parameter) -> parameter"): "a parameter's hash is its id",
    ("my_bucket_plan", "min(first, cap) -> min(cap, first)"): COMMUTES,
    ("my_bucket_plan", "for _, _, n in filling[dtype] -> "): "a sum in any order",
    ("my_schedule", "list(range(units)) -> range(units)"): "it is only gone through",
    ("ranks_needed", "zip(units, units[1:], strict=False) -> "): "pairs either way",
    ("ranks_needed", "for unit in units -> "): "a sum in any order",
    ("my_gpipe", "for op in 'FB' -> for op in list('FB')[:2]"): "these are all",
    ("my_gpipe", "for microbatch in range(num_microbatches) -> "): "microbatches may "
    "come in any order, if all stages take the same",
    ("my_cut", "for end in range(first + 1, last + 1): "): "the least of all",
    ("my_cut", "1 -> 2 (line 7)"): "an empty stage is never the least cut",
    ("my_cut", "1 -> 2 (line 11)"): "an empty stage is never the least cut",
    ("my_cut", "0 -> "): "only differences of sums count",
    ("my_cut", "max(own, dearest) -> max(dearest, own)"): COMMUTES,
    ("my_ledger", "for "): ORDER,
    ("my_ledger", "s.data_ptr() -> s"): "storages are equal if their memory is",
    ("largest_batch", "12 * config.num_parameters + 8 * t -> "): "a few bytes are less "
    "than the quarter of a row that is always left",
    ("largest_batch", "8 * t -> "): "less than the quarter of a row that is left",
    ("largest_batch", "8 -> "): "less than the quarter of a row that is left",
    ("largest_batch", "max(0, (memory - always) // of_a_row) -> "): COMMUTES,
    ("step_in_backward", "for "): ORDER,
    ("copy_to_ranks", "return total -> "): "autograd casts it to the type of x",
    ("copy_to_ranks", "x.view_as(x) -> x"): "autograd makes the view",
    ("my_server", "for _ in range(pushes)"): "only their number counts",
    ("node_group", "list(range(first, first + size)) -> "): "any sequence of ranks",
    ("ring_reduce_scatter", "(rank - 1) % n -> rank - 1"): "lists count from the end",
    ("ring_reduce_scatter", "(rank - 2 - k) % n -> rank"): "lists count from the end",
    ("average_gradients_flat", "for "): ORDER,
    ("vocab_loss", "(place >= 0) & (place < words) -> (place <"): "and commutes",
    ("vocab_loss", "2 -> 3"): "four numbers for each token are allowed",
    ("vocab_loss", "(sums[0].log() - sums[1]).mean().item()"): "a tensor of one number",
    ("sharded_linear", "x, shard = ctx.saved_tensors"): "the function's own arguments",
    ("mini_ddp", "for "): ORDER,
    ("mini_ddp", "missing == full -> missing >= full"): "no list is larger than full",
    ("my_stage_step", "for k, (x, y) in enumerate(kept)"): ORDER,
    ("accumulate", "for "): ORDER,
    ("make_replicas", "for state in states -> "): "of these, only the types count",
    ("make_replicas", "for "): ORDER,
    ("ring_transfers", "for step in "): ORDER,
    ("ring_transfers", "for rank in "): ORDER,
    ("ring_transfers", "rank - 1 - step -> step -"): "the chunks' numbers are free",
    ("ring_transfers", "rank - 1 -> rank + 1"): "a chunk may start on any rank",
    ("ring_transfers", "rank - 1 -> rank (line"): "a chunk may start on any rank",
    ("ring_transfers", "1 -> 2 (line 8)"): "a chunk may start on any rank",
    ("ring_transfers", "1 -> 0 (line 8)"): "a chunk may start on any rank",
    ("my_merge", "torch.logaddexp(lse1, lse2) -> "): "a sum in any order",
    ("my_merge", "0 -> "): "e to the power of -inf less anything finite is 0",
    (
        "my_merge",
        "for one in (lse1, lse2) -> for one in list((lse1, lse2))[:2]",
    ): "these are both",
    ("my_zigzag", "min((k + 1) * size, length) -> "): COMMUTES,
    ("my_zigzag", "2 -> 3 (line 4)"): "further chunks are empty, and no rank's",
    ("my_ring", "torch.zeros_like(q) -> q"): "what has seen no key weighs nothing",
    ("my_ring", "q -> "): "queries, keys and values have one shape",
    ("my_ring", "0 -> "): "any channel has the shape of the lse",
    ("my_ring", "step == ranks - 1 -> step >= ranks - 1"): "no step comes after it",
    ("my_gradient_check", "torch.rand_like(function(*inputs)) + 0.5 -> torch"): "any "
    "weights that differ",
    ("my_gradient_check", "0.5 -> "): "any weights that differ",
    ("my_gradient_check", "for step in (1e-05, -1e-05): "): "these are both",
    ("my_gradient_check", "tensor.detach().clone() -> "): "nothing changes it in place",
    ("my_gradient_check", "abs(slope - expected) < "): "a bound that is never met",
    ("my_gradient_check", "1e-07 * (1 + abs(slope)) -> 1e-07"): "right gradients are "
    "nearer than any of these bounds, wrong ones farther",
    ("my_gradient_check", "1 + abs(slope) -> 1"): "as above",
    ("my_gradient_check", "1 -> 2"): "as above",
    ("my_gradient_check", "slope - expected -> expected - slope"): "abs takes both",
    ("repaired", "device = torch.device('cpu') -> pass"): IMAGINED,
    ("repaired", "torch.device('cpu') -> "): IMAGINED,
    (
        "repaired",
        "if torch.cuda.is_available(): device = torch.device('cuda', "
        "int(os.env -> if True",
    ): IMAGINED,
    ("repaired", "torch.cuda.is_available() -> torch.cuda"): IMAGINED,
    ("repaired", "torch.cuda.set_device(device) -> "): "tensors are put on GPUs by "
    "their numbers",
    (
        "repaired",
        "DataLoader(data, batch_size=8, sampler=sampler) -> DataLoader(data, sampler",
    ): "any size of batches",
    ("repaired", "DataLoader(mine, batch_size=8) -> DataLoader(mine)"): "as above",
    ("repaired", "8 -> "): "as above",
    (
        "repaired",
        "for x, y in loader: loss = ddp(x.to(device), y.to(device)) "
        "optimizer.z -> for x, y in list(loader)[::-1]",
    ): "rows come in any order",
    (
        "repaired",
        "for x, y in DataLoader(mine, batch_size=8): total += model(x.to(device "
        "-> for x, y in list(DataLoader(mine, batch_size=8))[::-1]",
    ): "as above",
    ("repaired", "torch.zeros(1, device=device) -> torch.zeros(1)"): MEET,
    ("repaired", "x.to(device) -> x ("): MEET,
    ("repaired", "y.to(device) -> y ("): MEET,
    ("repaired", "total.item() -> total"): "a tensor of one number",
    ("repaired", "n * epoch + rank -> n * epoch - rank"): "no two seeds are equal, too",
    ("repaired", "0 -> 1 (line 32)"): "any one rank may write",
    ("my_kept", "chosen[:, choice].tolist() -> "): "a tensor of one number is an index",
    ("my_auxiliary_loss", "return num_experts * "): "the scores are float32",
    ("my_auxiliary_loss", "scores.softmax(-1).sum(0) -> "): "all is summed in the end",
    ("my_auxiliary_loss", "-1 -> 1"): "the last of two dimensions",
    ("my_two_averages", "for gradients, group in "): ORDER,
    ("my_two_averages", "for gradient in gradients"): ORDER,
    ("my_exposed", "for start, end, kind in events: "): "they are sorted afterwards",
    ("my_exposed", "running[kind] += change -> "): "minus one is as much as one: any",
    ("my_straggler", "for times in starts: "): "a sum in any order",
    ("my_straggler", "0 -> -1 (line 2)"): "every collective has as many ranks",
    ("my_step_time", "max(bucket, "): COMMUTES,
    ("my_gaps", "max(reached, ends) -> max(ends, reached)"): COMMUTES,
    ("my_gaps", "min(begins, end) -> min(end, begins)"): COMMUTES,
    **{
        ("my_layout", f"{loop} -> for {each} in list({every}){part}"): (
            "the best is not at an end of it"
        )
        for loop, each, every in (
            ("for layout in choices(cluster.gpus)", "layout", "choices(cluster.gpus)"),
            (
                "for each in every if each.ledger.total <= 0.95 * LIMIT",
                "each",
                "every",
            ),
        )
        for part in ("[1:]", "[:-1]", "[::-1]")
    },
    ("my_layout", "each.ledger.total <= 0.95 * LIMIT -> each.ledger.total < "): "none "
    "is equal to it",
    ("my_layout", "0.95 * LIMIT -> LIMIT"): "none lies between",
    ("my_layout", "0.95 * LIMIT -> 0.95 + LIMIT"): "none lies between",
    ("my_layout", "sum(best.sent.values()) -> max("): "a pipeline sends along one axis",
    ("my_interval", "9 -> "): "the last term of a series moves the interval little",
    (
        "my_suspect",
        "votes == len(row) -> votes >= len(row)",
    ): "no more votes than ranks",
    ("my_diagnosis", "for rank, (_, group) in last.items(): come = "): ORDER,
    (
        "my_diagnosis",
        "for rank, (_, group) in last.items(): come = [[g for _, g in calls[pee -> for "
        "rank, (_, group) in list(last.items())[:2]",
    ): "of two ranks that wait, one waits for the cause",
    ("my_diagnosis", "for peer, number in zip(group, come, strict=True): "): ORDER,
    ("my_diagnosis", "for r in range(len(where)) if "): ORDER,
    ("my_diagnosis", "for one, two in "): ORDER,
    ("my_diagnosis", "for odd in both: "): ORDER,
    ("my_diagnosis", "for _, group in waits -> "): ORDER,
    (
        "my_diagnosis",
        "for _, group in last.values() -> ",
    ): "other ranks wait in the last rank's group, or it is alone there and innocent",
    ("my_diagnosis", "for r in last if "): ORDER,
    ("my_diagnosis", "for r in both -> "): ORDER,
    ("my_diagnosis", "ValueError("): "each hang has a cause",
    ("my_diagnosis", "where -> calls (line 21)"): "each hang has a cause",
    ("my_diagnosis", "calls -> where (line 21)"): "each hang has a cause",
    ("my_diagnosis", "where[peer] == 'returned' -> where[peer] >= "): "no place comes "
    "after it in the alphabet",
    ("my_diagnosis", "where -> calls (line 4)"): "both lists are equally long",
    ("my_diagnosis", "for _, g in calls[peer] -> "): ORDER,
}
REVERSED = "[::-1]"  # where the order does not matter, only this change survives
