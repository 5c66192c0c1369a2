"""Answers to the exercises of chapter 13, right ones and wrong ones."""

from slips import answers

from ddp_course.chapters.ch13_async import solutions

ANSWERS = answers(
    solutions,
    globals(),
    my_staleness="""
    staleness_by_looking_back:
        found = []
        for at, (what, worker) in enumerate(record):
            if what == "push":
                since = max(k for k in range(at) if record[k] == ("pull", worker))
                found.append(sum(one == "push" for one, _ in record[since:at]))
        return found
    staleness_of_tensors_versions:
        # PyTorch counts the changes of a tensor, too.
        weights, pulled, found = torch.zeros(1), {}, []
        for what, worker in record:
            if what == "pull":
                pulled[worker] = weights._version
                continue
            found += [weights._version - pulled[worker]]
            weights += 1
        return found
    its_own_push_counts: nobody else has pushed in between
        version - pulled[worker] => version - pulled[worker] + 1
    pulls_count: worker 1 has pushed after
        pulled[worker] = version => version += 1; pulled[worker] = version
    since_the_first_pull: a worker that pulls again has newer weights
        pulled[worker] = version => pulled.setdefault(worker, version)
    since_its_last_push: a worker that pulls again has newer weights
        pulled[worker] = version => pulled.setdefault(worker, 0)
        version += 1 => version += 1; pulled[worker] = version
    workers_less_one: because
        return found => return [len(pulled) - 1 for _ in found]
    on_average: expected `[0]`
        return found => return sum(found) / max(len(found), 1)
    by_workers: in the order of the pushes
        found = {}
        pushes = [worker for what, worker in record if what == "push"]
        ages = solutions.my_staleness(record)
        for worker, age in zip(pushes, ages):
            found.setdefault(worker, []).append(age)
        return [age for worker in sorted(found) for age in found[worker]]
    one_call_for_each_event: RecursionError
        def rest(k, version, pulled):
            if k == len(record):
                return []
            what, worker = record[k]
            if what == "pull":
                return rest(k + 1, version, {**pulled, worker: version})
            return [version - pulled[worker], *rest(k + 1, version + 1, pulled)]

        return rest(0, 0, {})
    versions_in_a_byte: each push changes the weights
        version, pulled, found = torch.zeros((), dtype=torch.uint8), {}, []
        for what, worker in record:
            if what == "pull":
                pulled[worker] = int(version)
            else:
                found.append(int(version) - pulled[worker])
                version += 1
        return found
    since_anybodys_pull: pulls bring this one no new ones
        version - pulled[worker] => version - max(pulled.values())
    by_its_own_clock: worker 1 has pushed after worker 2 pulled
        # Counts the worker's own pushes, as if they were all.
        pushed, pulled, found = {}, {}, []
        for what, worker in record:
            if what == "pull":
                pulled[worker] = pushed.get(worker, 0)
            else:
                found.append(pushed.get(worker, 0) - pulled[worker])
                pushed[worker] = pushed.get(worker, 0) + 1
        return found
    pushes_of_others: its own push counts, too
        found = []
        for at, (what, worker) in enumerate(record):
            if what == "push":
                since = max(k for k in range(at) if record[k] == ("pull", worker))
                between = record[since:at]
                found.append(sum(w == "push" and who != worker for w, who in between))
        return found
    how_many_others: each push changes the weights
        # Counts workers in between, not what they pushed.
        found = []
        for at, (what, worker) in enumerate(record):
            if what == "push":
                since = max(k for k in range(at) if record[k] == ("pull", worker))
                found.append(len({w for kind, w in record[since:at] if kind == "push"}))
        return found
    the_server_does_not_push: worker 0 is a worker like all others
        else: => elif worker:  # rank 0 is the server elsewhere
    the_same_object: raised `ValueError
        found = []
        for at, (what, worker) in enumerate(record):
            if what == "push":
                pulls = (k for k in range(at) if record[k][0] == "pull")
                since = max(k for k in pulls if record[k][1] is worker)
                found.append(sum(kind == "push" for kind, _ in record[since:at]))
        return found
    eats_the_record: changed `record`
        for what, worker in record: => while record:
        =>     what, worker = record.pop(0)
    """,
    my_replay="""
    replay_by_versions:
        versions, pulled = [weights], {}
        for what, worker in record:
            if what == "pull":
                pulled[worker] = len(versions) - 1
            else:
                newest = versions[-1] - lr * gradient(worker, versions[pulled[worker]])
                versions.append(newest)
        return versions[-1].clone()
    replay_with_an_optimizer:
        # It adds with one rounding less, which no last bit may depend on.
        weights = weights.clone()
        sgd = torch.optim.SGD([weights], lr=lr)
        pulled = dict.fromkeys({worker for _, worker in record}, weights.clone())
        for what, worker in record:
            if what == "pull":
                pulled[worker] = weights.clone()
            else:
                weights.grad = gradient(worker, pulled[worker])
                sgd.step()
        return weights
    a_call_for_each_event: RecursionError
        def rest(k, now, pulled):
            if k == len(record):
                return now
            what, worker = record[k]
            if what == "pull":
                return rest(k + 1, now, {**pulled, worker: now})
            return rest(k + 1, now - lr * gradient(worker, pulled[worker]), pulled)

        return rest(0, weights.clone(), {})
    in_32_bits: of float64
        # Computes in bfloat16 or in float32.
        coarse = weights.dtype == torch.bfloat16
        x = weights if coarse else weights.float()
        return solutions.my_replay(record, x, gradient, lr)
    never_stale: which its worker has pulled last
        gradient(worker, pulled[worker]) => gradient(worker, weights)
    a_second_name: which its worker has pulled last
        pulled[worker] = weights.clone() => pulled[worker] = weights
    on_the_callers_weights: work on a copy
        weights.clone(), {} => weights, {}
    a_rate_of_32_bits: subtracted once
        lr * gradient => torch.tensor(lr) * gradient
    applied_twice: subtracted once
        lr * gradient => 2 * lr * gradient
    scales_the_gradient_itself: changed a gradient that `gradient` returned
        weights -= lr * gradient(worker, pulled[worker])
        => weights -= gradient(worker, pulled[worker]).mul_(lr)
    empties_the_gradient: changed a gradient that `gradient` returned
        weights -= lr * gradient(worker, pulled[worker])
        => g = gradient(worker, pulled[worker])
        => weights -= lr * g
        => g.zero_()
    the_last_is_forgotten: the record has pushes of
        in record: => in record[:-1]:
    in_the_order_of_workers: the record has pushes of
        in record: => in sorted(record, key=lambda one: one[1]):
    pulls_with_every_push: which its worker has pulled last
        , pulled[worker] => , pulled[worker]); pulled[worker] = weights.clone(
    all_at_the_end: which its worker has pulled last
        # One synchronous step.
        pushes = [worker for what, worker in record if what == "push"]
        return weights - lr * sum(gradient(worker, weights) for worker in pushes)
    in_more_digits: pulled last
        # Right but for the last bits.
        exact = solutions.my_replay(
            record, weights.double(), lambda w, x: gradient(w, x.to(weights.dtype)), lr
        )
        return exact.to(weights.dtype)
    by_staleness: subtracted once
        # A remedy that nobody has asked for.
        ages = iter(solutions.my_staleness(record))
        remedied = lambda *who: gradient(*who) / max(1, next(ages))  # noqa: E731
        return solutions.my_replay(record, weights, remedied, lr)
    without_any_push: raised `UnboundLocalError
        versions, pulled = [weights], {}
        for what, worker in record:
            if what == "pull":
                pulled[worker] = versions[-1]
            else:
                newest = versions[-1] - lr * gradient(worker, pulled[worker])
                versions.append(newest)
        return newest
    without_any_event: raised `IndexError
        return weights => record[-1]
        => return weights
    rank_0_does_not_push: the record has pushes of
        else: => elif worker:
    eats_the_record_too: changed `record`
        for what, worker in record: => while record:
        =>     what, worker = record.pop(0)
    """,
    my_may_begin="""
    may_begin_as_all_allow:
        return all(clocks[worker] <= clock + bound for clock in clocks.values())
    may_begin_sorted:
        slowest, *_ = sorted(clocks.values())
        return not clocks[worker] > slowest + bound
    measured_from_the_fastest: with bound 0 all must end a gradient
        clocks[worker] - min(clocks.values()) => max(clocks.values()) - clocks[worker]
    less_than_the_bound: nobody is ahead
        <= => <
    one_more: with bound 0 all must end a gradient
        <= bound => <= bound + 1
    whoever_is_ahead: the slowest need not wait
        clocks[worker] - min => max(clocks.values()) - min
    from_the_mean: the slowest counts
        min(clocks.values()) => sum(clocks.values()) / len(clocks)
    numbered_without_gaps: KeyError
        min(clocks.values()) => min(clocks[k + 1] for k in range(len(clocks)))
    of_those_after_it: whatever its number
        min(clocks.values()) => min(clocks[k] for k in clocks if k >= worker)
    of_the_others: ValueError
        clocks.values() => clock for who, clock in clocks.items() if who != worker
    from_the_next_slowest: with bound 0 all must end a gradient
        min(clocks.values()) => sorted(clocks.values())[:2][-1]
    nobody_is_too_far_away: the slowest need not wait
        clocks[worker] - min(clocks.values()) <= bound
        => all(abs(clocks[worker] - c) <= bound for c in clocks.values())
    may_begin_by_numpy:
        return torch.tensor(solutions.my_may_begin(clocks, worker, bound)).numpy()[()]
    eats_the_clocks: changed `clocks`
        return clocks[worker] - min(clocks.values()) <= bound
        => mine = clocks[worker]
        => return min(mine - clocks.pop(k) for k in [*clocks]) <= bound
    eats_its_clock: changed `clocks`
        slowest = min(clocks.values())
        return clocks.pop(worker) - slowest <= bound
    clocks_as_torch_has_them: worker 1 is 1 ahead
        counts = torch.Tensor(list(clocks.values()))
        return bool(clocks[worker] - bound <= counts.min())
    of_three_workers: expected
        min(clocks.values()) => min(clocks[k] for k in sorted(clocks)[:3] + [worker])
    a_rounded_bound: ahead of the slowest
        <= bound => <= (bound if bound == float("inf") else round(bound))
    one_for_true: expected True or False
        return int(solutions.my_may_begin(clocks, worker, bound))
    """,
    my_server="""
    server_that_sends_copies:
        for _ in range(pushes):
            gradient = torch.zeros_like(weights)
            worker = dist.recv(gradient)
            weights.add_(gradient, alpha=-lr)
            dist.isend(weights.clone(), worker).wait()
    server_that_asks_its_work:
        while pushes:
            work = dist.irecv(gradient := torch.empty_like(weights))
            work.wait()
            weights -= gradient * lr
            dist.send(weights, work._source_rank())
            pushes -= 1
    server_that_waits_for_its_copies_at_the_end:
        gradient, sending = torch.empty_like(weights), []
        for _ in range(pushes):
            worker = dist.recv(gradient)
            weights -= lr * gradient
            sending.append(dist.isend(weights.clone(), worker))
        for handle in sending:
            handle.wait()
    waits_at_the_end: a tensor changed before 'wait()': send to rank
        gradient, sending = torch.empty_like(weights), []
        for _ in range(pushes):
            worker = dist.recv(gradient)
            weights -= lr * gradient
            sending.append(dist.isend(weights, worker))
        for handle in sending:
            handle.wait()
    weights_for_each_worker: in `weights`; expected
        gradient, own = torch.empty_like(weights), {}
        for _ in range(pushes):
            worker = dist.recv(gradient)
            mine = own.setdefault(worker, weights.clone())
            mine -= lr * gradient
            dist.send(mine, worker)
            weights.copy_(mine)
    in_the_order_of_ranks: still waits to
        for _ in => for push in
        worker = dist.recv(gradient)
        => worker = 1 + push % (dist.get_world_size() - 1); dist.recv(gradient, worker)
    answered_before_the_update: the weights after its own gradient
        dist.send(weights, worker) => pass
        weights - => dist.send(weights, worker); weights -
    used_twice: Is each gradient used once
        lr * gradient => 2 * lr * gradient
    never_answers: still waits to
        dist.send(weights, worker) => pass
    another_tensor: changed in place
        weights -= lr => weights = weights - lr
    in_other_memory: changed in place
        weights -= lr * gradient => weights.data = weights - lr * gradient
    the_gradient_goes_back: the weights after its own gradient
        dist.send(weights, worker) => dist.send(gradient, worker)
    answers_all: one answer to each push
        dist.send(weights, worker) => for worker in range(1, dist.get_world_size()):
        =>     dist.isend(weights.clone(), worker)
    one_too_few: still waits to
        range(pushes) => range(pushes - 1)
    waits_for_all: still waits to
        # Synchronous: an answer when everybody has pushed.
        gradient = torch.empty_like(weights)
        workers = [dist.recv(gradient) for _ in range(dist.get_world_size() - 1)]
        for worker in workers:
            dist.send(weights, worker)
    by_the_workers_number: Is each gradient used once
        lr * gradient => lr * worker
    the_first_gradient_for_ever: Is each gradient used once
        weights -= lr * gradient => first = first if _ else gradient.clone()
        => weights -= lr * first
    its_first_number: Is each gradient used once
        lr * gradient => lr * gradient.flatten()[0]
    never_waited_for: never waits for a message that it started
        dist.send(weights, worker) => dist.isend(weights, worker)
    in_narrow_numbers: in `weights`; expected
        weights -= lr * gradient => step = weights.float() - lr * gradient.float()
        => weights.copy_(step)
    one_too_many: no more and no fewer
        range(pushes) => range(pushes + 1)
    a_rate_of_32_bits: in `weights`; expected
        lr * gradient => torch.tensor(lr) * gradient
    trainable_weights: left `requires_grad`
        sgd = torch.optim.SGD([weights.requires_grad_()], lr=lr)
        for _ in range(pushes):
            weights.grad = torch.empty_like(weights)
            worker = dist.recv(weights.grad)
            sgd.step()
            dist.send(weights.detach(), worker)
    at_least_one_push: no more and no fewer
        gradient = torch.empty_like(weights)
        while True:
            worker = dist.recv(gradient)
            weights -= lr * gradient
            dist.send(weights, worker)
            pushes -= 1
            if not pushes:
                break
    no_last_answer: and the last one, too
        dist.send(weights, worker)
        => if _ < pushes - 1:
        =>     dist.send(weights, worker)
    """,
)
