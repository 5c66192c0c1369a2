"""Right answers to the exercises of chapter 13, in other styles than the solutions."""

import torch
import torch.distributed as dist


def staleness_by_looking_back(record):
    found = []
    for at, (what, worker) in enumerate(record):
        if what == "push":
            since = max(k for k in range(at) if record[k] == ("pull", worker))
            found.append(sum(one == "push" for one, _ in record[since:at]))
    return found


def staleness_of_tensors_versions(record):
    """PyTorch counts the changes of a tensor, too."""
    weights, pulled, found = torch.zeros(1), {}, []
    for what, worker in record:
        if what == "pull":
            pulled[worker] = weights._version
            continue
        found += [weights._version - pulled[worker]]
        weights += 1
    return found


def replay_by_versions(record, weights, gradient, lr):
    versions, pulled = [weights], {}
    for what, worker in record:
        if what == "pull":
            pulled[worker] = len(versions) - 1
        else:
            newest = versions[-1] - lr * gradient(worker, versions[pulled[worker]])
            versions.append(newest)
    return versions[-1].clone()


def replay_with_an_optimizer(record, weights, gradient, lr):
    """It adds with one rounding less, which no last bit may depend on."""
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


def may_begin_as_all_allow(clocks, worker, bound):
    return all(clocks[worker] <= clock + bound for clock in clocks.values())


def may_begin_sorted(clocks, worker, bound):
    slowest, *_ = sorted(clocks.values())
    return not clocks[worker] > slowest + bound


def server_that_asks_its_work(weights, lr, pushes):
    while pushes:
        work = dist.irecv(gradient := torch.empty_like(weights))
        work.wait()
        weights -= gradient * lr
        dist.send(weights, work._source_rank())
        pushes -= 1


def server_that_sends_copies(weights, lr, pushes):
    for _ in range(pushes):
        gradient = torch.zeros_like(weights)
        worker = dist.recv(gradient)
        weights.add_(gradient, alpha=-lr)
        dist.isend(weights.clone(), worker).wait()


RIGHT = {
    "my_staleness": [staleness_by_looking_back, staleness_of_tensors_versions],
    "my_replay": [replay_by_versions, replay_with_an_optimizer],
    "my_may_begin": [may_begin_as_all_allow, may_begin_sorted],
    "my_server": [server_that_sends_copies, server_that_asks_its_work],
}
