"""Wrong answers to the exercises of chapter 13, each with a word of its hint."""

import torch
import torch.distributed as dist

from ddp_course.chapters.ch13_async import solutions

# my_staleness


def by_its_own_clock(record):
    """Counts the worker's own pushes, as if they were all."""
    pushed, pulled, found = {}, {}, []
    for what, worker in record:
        if what == "pull":
            pulled[worker] = pushed.get(worker, 0)
        else:
            found.append(pushed.get(worker, 0) - pulled[worker])
            pushed[worker] = pushed.get(worker, 0) + 1
    return found


def its_own_push_counts(record):
    return [staleness + 1 for staleness in solutions.my_staleness(record)]


def pulls_count(record):
    pulled, found = {}, []
    for at, (what, worker) in enumerate(record):
        if what == "pull":
            pulled[worker] = at
        else:
            found.append(at - pulled[worker] - 1)
    return found


def since_the_first_pull(record):
    seen, first = set(), []
    for what, worker in record:
        if what == "push" or worker not in seen:
            first.append((what, worker))
        seen.add(worker)
    return solutions.my_staleness(first)


def since_its_last_push(record):
    version, since, found = 0, {}, []
    for what, worker in record:
        if what == "push":
            found.append(version - since.get(worker, 0))
            version += 1
            since[worker] = version
    return found


def pushes_of_others(record):
    found = []
    for at, (what, worker) in enumerate(record):
        if what == "push":
            since = max(k for k in range(at) if record[k] == ("pull", worker))
            between = record[since:at]
            found.append(sum(w == "push" and who != worker for w, who in between))
    return found


def workers_less_one(record):
    workers = {worker for _, worker in record}
    return [len(workers) - 1 for what, _ in record if what == "push"]


def on_average(record):
    found = solutions.my_staleness(record)
    return sum(found) / max(len(found), 1)


def since_anybodys_pull(record):
    version, newest, found = 0, 0, []
    for what, _ in record:
        if what == "pull":
            newest = version
        else:
            found.append(version - newest)
            version += 1
    return found


def how_many_others(record):
    """Counts workers in between, not what they pushed."""
    found = []
    for at, (what, worker) in enumerate(record):
        if what == "push":
            since = max(k for k in range(at) if record[k] == ("pull", worker))
            found.append(len({w for kind, w in record[since:at] if kind == "push"}))
    return found


# my_replay


def never_stale(record, weights, gradient, lr):
    weights = weights.clone()
    for what, worker in record:
        if what == "push":
            weights -= lr * gradient(worker, weights)
    return weights


def a_second_name(record, weights, gradient, lr):
    """Without `clone`, what was pulled changes with the weights."""
    weights, pulled = weights.clone(), {}
    for what, worker in record:
        if what == "pull":
            pulled[worker] = weights
        else:
            weights -= lr * gradient(worker, pulled[worker])
    return weights


def on_the_callers_weights(record, weights, gradient, lr):
    weights.copy_(solutions.my_replay(record, weights, gradient, lr))
    return weights


def applied_twice(record, weights, gradient, lr):
    return solutions.my_replay(record, weights, lambda *x: 2 * gradient(*x), lr)


def the_last_is_forgotten(record, weights, gradient, lr):
    return solutions.my_replay(record[:-1], weights, gradient, lr)


def all_at_the_end(record, weights, gradient, lr):
    """One synchronous step."""
    pushes = [worker for what, worker in record if what == "push"]
    return weights - lr * sum(gradient(worker, weights) for worker in pushes)


def in_the_order_of_workers(record, weights, gradient, lr):
    record = sorted(record, key=lambda one: one[1])
    return solutions.my_replay(record, weights, gradient, lr)


def pulls_with_every_push(record, weights, gradient, lr):
    both = [[one, ("pull", one[1])] if one[0] == "push" else [one] for one in record]
    return solutions.my_replay(sum(both, []), weights, gradient, lr)


def by_staleness(record, weights, gradient, lr):
    """A remedy that nobody has asked for."""
    ages = iter(solutions.my_staleness(record))
    remedied = lambda *who: gradient(*who) / max(1, next(ages))  # noqa: E731
    return solutions.my_replay(record, weights, remedied, lr)


def in_more_digits(record, weights, gradient, lr):
    """Right but for the last bits."""
    exact = solutions.my_replay(
        record, weights.double(), lambda w, x: gradient(w, x.to(weights.dtype)), lr
    )
    return exact.to(weights.dtype)


# my_may_begin


def measured_from_the_fastest(clocks, worker, bound):
    return max(clocks.values()) - clocks[worker] <= bound


def less_than_the_bound(clocks, worker, bound):
    return clocks[worker] - min(clocks.values()) < bound


def one_more(clocks, worker, bound):
    return clocks[worker] - min(clocks.values()) <= bound + 1


def whoever_is_ahead(clocks, worker, bound):
    """One worker too far ahead stops all."""
    return max(clocks.values()) - min(clocks.values()) <= bound


def from_the_mean(clocks, worker, bound):
    return clocks[worker] - sum(clocks.values()) / len(clocks) <= bound


def numbered_without_gaps(clocks, worker, bound):
    slowest = min(clocks[k] for k in range(1, len(clocks) + 1))
    return clocks[worker] - slowest <= bound


def of_those_after_it(clocks, worker, bound):
    return all(clocks[worker] - c <= bound for w, c in clocks.items() if w > worker)


def of_the_others(clocks, worker, bound):
    return clocks[worker] - min(c for w, c in clocks.items() if w != worker) <= bound


def from_the_next_slowest(clocks, worker, bound):
    return clocks[worker] - sorted(clocks.values())[:2][-1] <= bound


def nobody_is_too_far_away(clocks, worker, bound):
    """Whoever is behind may not begin either."""
    return all(abs(clocks[worker] - clock) <= bound for clock in clocks.values())


# my_server


def in_the_order_of_ranks(weights, lr, pushes):
    gradient = torch.empty_like(weights)
    for push in range(pushes):
        worker = 1 + push % (dist.get_world_size() - 1)
        dist.recv(gradient, worker)
        weights -= lr * gradient
        dist.send(weights, worker)


def answered_before_the_update(weights, lr, pushes):
    gradient = torch.empty_like(weights)
    for _ in range(pushes):
        worker = dist.recv(gradient)
        dist.send(weights, worker)
        weights -= lr * gradient


def used_twice(weights, lr, pushes):
    solutions.my_server(weights, 2 * lr, pushes)


def never_answers(weights, lr, pushes):
    gradient = torch.empty_like(weights)
    for _ in range(pushes):
        dist.recv(gradient)
        weights -= lr * gradient


def another_tensor(weights, lr, pushes):
    """`weights = weights - ...` makes a new one, and the caller's stays."""
    gradient = torch.empty_like(weights)
    for _ in range(pushes):
        worker = dist.recv(gradient)
        weights = weights - lr * gradient
        dist.send(weights, worker)


def waits_for_all(weights, lr, pushes):
    """Synchronous: an answer when everybody has pushed."""
    gradient = torch.empty_like(weights)
    workers = [dist.recv(gradient) for _ in range(dist.get_world_size() - 1)]
    for worker in workers:
        dist.send(weights, worker)


def the_gradient_goes_back(weights, lr, pushes):
    gradient = torch.empty_like(weights)
    for _ in range(pushes):
        worker = dist.recv(gradient)
        weights -= lr * gradient
        dist.send(gradient, worker)


def answers_all(weights, lr, pushes):
    gradient = torch.empty_like(weights)
    for _ in range(pushes):
        dist.recv(gradient)
        weights -= lr * gradient
        for worker in range(1, dist.get_world_size()):
            dist.isend(weights.clone(), worker)


def one_too_few(weights, lr, pushes):
    solutions.my_server(weights, lr, pushes - 1)


WRONG = {
    "my_staleness": {
        by_its_own_clock: "worker 1 has pushed after worker 2 pulled",
        its_own_push_counts: "nobody else has pushed in between",
        pulls_count: "worker 1 has pushed after",
        since_the_first_pull: "who pulls again has newer weights",
        since_its_last_push: "who pulls again has newer weights",
        pushes_of_others: "its own push counts, too",
        workers_less_one: "because",
        on_average: "expected `[0]`",
        since_anybodys_pull: "those of others give a worker nothing",
        how_many_others: "each push changes the weights",
    },
    "my_replay": {
        never_stale: "which its worker has pulled last",
        a_second_name: "which its worker has pulled last",
        on_the_callers_weights: "work on a copy",
        applied_twice: "taken off once",
        the_last_is_forgotten: "the record has pushes of",
        all_at_the_end: "which its worker has pulled last",
        in_the_order_of_workers: "the record has pushes of",
        in_more_digits: "pulled last",
        pulls_with_every_push: "which its worker has pulled last",
        by_staleness: "taken off once",
    },
    "my_may_begin": {
        measured_from_the_fastest: "with bound 0 nobody begins before",
        less_than_the_bound: "nobody is ahead",
        one_more: "with bound 0 nobody begins before",
        whoever_is_ahead: "the slowest need not wait",
        from_the_mean: "the slowest counts",
        numbered_without_gaps: "KeyError",
        of_those_after_it: "whatever its number",
        of_the_others: "ValueError",
        from_the_next_slowest: "with bound 0 nobody begins before",
        nobody_is_too_far_away: "the slowest need not wait",
    },
    "my_server": {
        in_the_order_of_ranks: "still waits to ",
        answered_before_the_update: "the weights after its own gradient",
        used_twice: "Is each gradient used once",
        never_answers: "still waits to ",
        another_tensor: "changed in place",
        waits_for_all: "still waits to ",
        the_gradient_goes_back: "the weights after its own gradient",
        answers_all: "one answer to each push",
        one_too_few: "still waits to ",
    },
}
