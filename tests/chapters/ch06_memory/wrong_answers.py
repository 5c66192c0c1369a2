"""Wrong answers to the exercises of chapter 06, each with a word of its hint."""

import torch

from ddp_course.chapters.ch06_memory import solutions

# my_ledger


def _ledger(model, optimizer, count, grads=True, states=True):
    """Return a ledger with the mistake that `count` makes, or with parts missing."""
    parameters = list(model.parameters())
    kept = [t for state in optimizer.state.values() for t in state.values()]
    return {
        "parameters": count(parameters),
        "gradients": count([p.grad for p in parameters if p.grad is not None])
        if grads
        else count(parameters),
        "optimizer states": count([t for t in kept if isinstance(t, torch.Tensor)])
        if states
        else 2 * count(parameters),
    }


def _right(tensors):
    storages = [t.untyped_storage() for t in tensors]
    return sum({s.data_ptr(): s.nbytes() for s in storages}.values())


def views_are_sizes(model, optimizer):
    return _ledger(model, optimizer, lambda ts: sum(t.nbytes for t in ts))


def storages_more_than_once(model, optimizer):
    def count(tensors):
        return sum(t.untyped_storage().nbytes() for t in tensors)

    return _ledger(model, optimizer, count)


def by_the_first_address(model, optimizer):
    def count(tensors):
        found = {t.data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        return sum(found.values())

    return _ledger(model, optimizer, count)


def once_by_address_but_its_size(model, optimizer):
    def count(tensors):
        return sum({t.data_ptr(): t.nbytes for t in tensors}.values())

    return _ledger(model, optimizer, count)


def four_bytes_each(model, optimizer):
    return _ledger(model, optimizer, lambda ts: 4 * sum(t.numel() for t in ts))


def gradients_are_always_there(model, optimizer):
    return _ledger(model, optimizer, _right, grads=False)


def states_are_always_two(model, optimizer):
    return _ledger(model, optimizer, _right, states=False)


def no_counts_of_steps(model, optimizer):
    def count(tensors):
        return _right([t for t in tensors if t.dim()])

    return _ledger(model, optimizer, count)


def forgets_the_bias(model, optimizer):
    return _ledger(model, optimizer, lambda ts: _right([t for t in ts if t.dim() != 1]))


def makes_gradients(model, optimizer):
    told = _ledger(model, optimizer, _right)
    for parameter in model.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    return told


def only_the_total(model, optimizer):
    return sum(_ledger(model, optimizer, _right).values())


# largest_batch


def _rows(config, memory, always=12, blocks=None, head=None, itemsize=4, heads=0):
    """Return the rows with the mistakes that are asked for."""
    t, c = config.block_size, config.d_model
    blocks = 16 * c + 4 + config.n_head if blocks is None else blocks
    head = 2 * c + 2 + config.vocab_size if head is None else head
    of_a_row = itemsize * t * (config.n_layer * (blocks + heads * t) + head)
    return (memory - always * config.num_parameters) // of_a_row


def no_states(config, memory):
    return max(0, _rows(config, memory, always=4))


def gradients_too(config, memory):
    return max(0, _rows(config, memory, always=16))


def no_head(config, memory):
    return max(0, _rows(config, memory, head=0))


def no_logits(config, memory):
    return max(0, _rows(config, memory, head=2 * config.d_model + 2))


def plain_attention(config, memory):
    return max(0, _rows(config, memory, heads=config.n_head))


def sixteen_bits(config, memory):
    return max(0, _rows(config, memory, itemsize=2))


def inputs_of_blocks_only(config, memory):
    return max(0, _rows(config, memory, blocks=config.d_model))


def one_more(config, memory):
    return max(0, _rows(config, memory)) + 1


def one_block(config, memory):
    t, blocks = config.block_size, 16 * config.d_model + 4 + config.n_head
    head = 2 * config.d_model + 2 + config.vocab_size
    return max(0, (memory - 12 * config.num_parameters) // (4 * t * (blocks + head)))


def in_tokens(config, memory):
    return max(0, _rows(config, memory)) * config.block_size


def below_zero(config, memory):
    return _rows(config, memory) - 1


def a_fraction(config, memory):
    return _rows(config, memory) / 1


# step_in_backward


def _by_hook(model, make_optimizer, after):
    optimizers = {p: make_optimizer([p]) for p in model.parameters() if p.requires_grad}

    def hook(parameter):
        optimizers[parameter].step()
        after(parameter)

    for parameter in optimizers:
        parameter.register_post_accumulate_grad_hook(hook)


def keeps_the_gradients(model, make_optimizer):
    _by_hook(model, make_optimizer, lambda p: None)


def zeros_in_place_of_none(model, make_optimizer):
    _by_hook(model, make_optimizer, lambda p: p.grad.zero_())


def does_nothing(model, make_optimizer):
    pass


def frozen_ones_too(model, make_optimizer):
    for parameter in model.parameters():
        optimizer = make_optimizer([parameter])
        parameter.register_post_accumulate_grad_hook(
            lambda p, optimizer=optimizer: (optimizer.step(), optimizer.zero_grad())
        )


def a_new_optimizer_each_time(model, make_optimizer):
    def hook(parameter):
        make_optimizer([parameter]).step()
        parameter.grad = None

    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(hook)


def tied_ones_twice(model, make_optimizer):
    for _, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.requires_grad:
            optimizer = make_optimizer([parameter])

            def hook(p, optimizer=optimizer):
                if p.grad is None:
                    p.grad = torch.zeros_like(p)
                optimizer.step()
                p.grad = None

            parameter.register_post_accumulate_grad_hook(hook)


def all_at_the_last_one(model, make_optimizer):
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer, came = make_optimizer(trained), []

    def hook(parameter):
        came.append(parameter)
        if len(came) == len(trained):
            optimizer.step()
            optimizer.zero_grad()
            came.clear()

    for parameter in trained:
        parameter.register_post_accumulate_grad_hook(hook)


def keeps_them_in_a_list(model, make_optimizer):
    kept = []

    def forget(parameter):
        kept.append(parameter.grad)
        parameter.grad = None

    _by_hook(model, make_optimizer, forget)


def frees_without_a_step(model, make_optimizer):
    def hook(parameter):
        parameter.grad = None

    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(hook)


# What harder inputs find out


def of_trained_parameters(model, optimizer):
    frozen = [p for p in model.parameters() if not p.requires_grad]
    told = solutions.my_ledger(model, optimizer)
    return told | {"parameters": told["parameters"] - sum(p.nbytes for p in frozen)}


def with_buffers(model, optimizer):
    told = solutions.my_ledger(model, optimizer)
    return told | {
        "parameters": told["parameters"] + sum(b.nbytes for b in model.buffers())
    }


def looks_up_every_state(model, optimizer):
    told = solutions.my_ledger(model, optimizer)
    assert all(optimizer.state[p] is not None for p in model.parameters())
    return told


def of_half_of_the_types(model, optimizer):
    def count(tensors):
        return _right([t for t in tensors if t.dtype == torch.float32])

    return _ledger(model, optimizer, count)


def not_below_zero_forgotten(config, memory):
    return _rows(config, memory)


def without_heads(config, memory):
    return max(0, _rows(config, memory, blocks=16 * config.d_model + 4))


def without_norms(config, memory):
    c, heads = config.d_model, config.n_head
    head = 2 * c + config.vocab_size
    return max(0, _rows(config, memory, blocks=16 * c + heads, head=head))


def without_the_last_norm(config, memory):
    head = 2 * config.d_model + config.vocab_size
    return max(0, _rows(config, memory, head=head))


def in_a_hook_of_the_tensor(model, make_optimizer):
    for parameter in (p for p in model.parameters() if p.requires_grad):
        optimizer = make_optimizer([parameter])

        def hook(gradient, parameter=parameter, optimizer=optimizer):
            parameter.grad = gradient
            optimizer.step()
            parameter.grad = None

        parameter.register_hook(hook)


def matrices_alone(model, make_optimizer):
    _by_hook(
        model, lambda ps: make_optimizer(ps) if ps[0].dim() > 1 else _Idle(), _free
    )


class _Idle:
    def step(self):
        pass


def _free(parameter):
    parameter.grad = None


WRONG = {
    "my_ledger": {
        looks_up_every_state: "makes an empty one",
        of_half_of_the_types: "Not every number has four bytes",
        of_trained_parameters: "A frozen parameter is a parameter",
        with_buffers: "a buffer is none",
        views_are_sizes: "Two tensors can look at one storage",
        storages_more_than_once: "Two tensors can look at one storage",
        by_the_first_address: "wherever in it a view begins",
        once_by_address_but_its_size: "keeps all of its storage alive",
        four_bytes_each: "Not every number has four bytes",
        gradients_are_always_there: "`grad` is None",
        states_are_always_two: "optimizer states are",
        no_counts_of_steps: "All tensors count",
        forgets_the_bias: "parameters are",
        makes_gradients: "other gradients or states than before",
        only_the_total: "expected a dictionary",
    },
    "largest_batch": {
        not_below_zero_forgotten: "0 if not even one row fits",
        without_heads: "a few numbers per token",
        without_norms: "a few numbers per token",
        without_the_last_norm: "a few numbers per token",
        no_states: "which do not fit",
        gradients_too: "would fit",
        no_head: "which do not fit",
        no_logits: "which do not fit",
        plain_attention: "not there at the end of forward",
        sixteen_bits: "which do not fit",
        inputs_of_blocks_only: "which do not fit",
        one_more: "which do not fit",
        one_block: "which do not fit",
        in_tokens: "which do not fit",
        below_zero: "0 if not even one row fits",
        a_fraction: "expected a whole number",
    },
    "step_in_backward": {
        in_a_hook_of_the_tensor: "still have a gradient",
        matrices_alone: "stepped once in a step",
        keeps_the_gradients: "still have a gradient",
        zeros_in_place_of_none: "set it to None",
        does_nothing: "still have a gradient",
        frozen_ones_too: "RuntimeError",
        a_new_optimizer_each_time: "states kept from step to step",
        tied_ones_twice: "stepped once in a step",
        all_at_the_last_one: "Who keeps the others?",
        keeps_them_in_a_list: "Who keeps the others?",
        frees_without_a_step: "stepped once in a step",
    },
}
