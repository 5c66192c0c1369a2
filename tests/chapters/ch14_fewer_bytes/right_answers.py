"""Right answers to the exercises of chapter 14, in other styles than the solutions."""

import torch
import torch.distributed as dist


class memory_as_a_class:
    def __init__(self, compress):
        self.compress, self.held_back = compress, 0

    def __call__(self, gradient):
        wanted = self.held_back + gradient
        sent = self.compress(wanted)
        self.held_back = wanted - sent
        return sent


def memory_in_place(compress):
    kept = {}

    def send(gradient):
        memory = kept.setdefault("memory", torch.zeros_like(gradient))
        memory += gradient
        sent = compress(memory).clone()
        memory -= sent
        return sent

    return send


def topk_as_one_message(gradient, k):
    """Places travel as numbers: float64 has them all."""
    flat = gradient.reshape(-1)
    places = flat.abs().argsort(descending=True)[:k]
    mine = torch.stack([places.double(), flat[places].double()])
    messages = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(messages, mine)
    places, values = torch.cat(messages, dim=1)
    mean = torch.zeros(flat.numel(), dtype=torch.float64)
    mean.index_add_(0, places.long(), values / len(messages))
    return mean.to(gradient.dtype).view_as(gradient)


def topk_by_a_sparse_tensor(gradient, k):
    flat, n = gradient.flatten(), dist.get_world_size()
    places = flat.abs().topk(k, sorted=False).indices
    all_places, all_values = places.new_empty(n * k), flat.new_empty(n * k)
    dist.all_gather(list(all_places.split(k)), places)
    dist.all_gather(list(all_values.split(k)), flat[places])
    sparse = torch.sparse_coo_tensor(all_places[None], all_values, flat.shape)
    return (sparse.to_dense() / n).reshape(gradient.shape)


def outer_step_by_pytorch(common, replicas, momentum, lr, mu):
    sgd = torch.optim.SGD(common, lr=lr, momentum=mu, nesterov=mu > 0)
    for number, (here, velocity) in enumerate(zip(common, momentum, strict=True)):
        here.grad = here - torch.stack([each[number] for each in replicas]).mean(0)
        sgd.state[here]["momentum_buffer"] = velocity
    sgd.step()
    if mu == 0:  # then SGD keeps none
        for here, velocity in zip(common, momentum, strict=True):
            velocity.copy_(here.grad)
    for here in common:
        here.grad = None


def outer_step_forward(common, replicas, momentum, lr, mu):
    for number, here in enumerate(common):
        mean = sum(each[number] for each in replicas) / len(replicas)
        forward = mean - here
        momentum[number].copy_(mu * momentum[number] - forward)
        here += lr * forward - lr * mu * momentum[number]


RIGHT = {
    "my_memory": [memory_as_a_class, memory_in_place],
    "my_topk_mean": [topk_as_one_message, topk_by_a_sparse_tensor],
    "my_outer_step": [outer_step_by_pytorch, outer_step_forward],
}
