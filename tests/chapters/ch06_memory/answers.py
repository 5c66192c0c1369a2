"""Answers to the exercises of chapter 06, right ones and wrong ones."""

# ruff: noqa: F401 (the texts use what is imported)

from slips import answers

from ddp_course import theory
from ddp_course.chapters.ch06_memory import solutions

ANSWERS = answers(
    solutions,
    globals(),
    my_ledger="""
    my_ledger_by_object:
        parameters = list(model.parameters())
        kinds = {
            "parameters": parameters,
            "gradients": [p.grad for p in parameters if p.grad is not None],
            "optimizer states": [
                t
                for p in parameters
                for t in optimizer.state.get(p, {}).values()
                if torch.is_tensor(t)
            ],
        }
        return {
            kind: sum(s.nbytes() for s in {t.untyped_storage() for t in tensors})
            for kind, tensors in kinds.items()
        }
    my_ledger_in_one_loop:
        ledger = dict.fromkeys(("parameters", "gradients", "optimizer states"), 0)
        seen = set()

        def add(kind, tensor):
            place = kind, tensor.untyped_storage().data_ptr()
            ledger[kind] += (place not in seen) * tensor.untyped_storage().nbytes()
            seen.add(place)

        for parameter in model.parameters():
            add("parameters", parameter)
            if parameter.grad is not None:
                add("gradients", parameter.grad)
            if parameter in optimizer.state:
                for state in optimizer.state[parameter].values():
                    if hasattr(state, "untyped_storage"):
                        add("optimizer states", state)
        return ledger
    looks_up_every_state: creates an empty state
        optimizer.state.values() => [optimizer.state[p] for p in parameters]
    of_half_of_the_types: Not every number has four bytes
        for tensor in tensors => for tensor in tensors if tensor.dtype == torch.float32
    of_trained_parameters: A frozen parameter is a parameter
        count(parameters) => count(p for p in parameters if p.requires_grad)
    with_buffers: a buffer is none
        count(parameters) => count([*parameters, *model.buffers()])
    views_are_sizes: Two tensors can look at one storage
        storages = [tensor.untyped_storage() for tensor in tensors]
        => return sum(tensor.nbytes for tensor in tensors)
    storages_more_than_once: Two tensors can look at one storage
        storages = [tensor.untyped_storage() for tensor in tensors]
        => return sum(t.untyped_storage().nbytes() for t in tensors)
    by_the_first_address: wherever in it a view begins
        storages = [tensor.untyped_storage() for tensor in tensors]
        => tensors = {t.data_ptr(): t for t in tensors}.values()
        => return sum(t.untyped_storage().nbytes() for t in tensors)
    once_by_address_but_its_size: keeps all of its storage alive
        storages = [tensor.untyped_storage() for tensor in tensors]
        => return sum({t.data_ptr(): t.nbytes for t in tensors}.values())
    four_bytes_each: Not every number has four bytes
        storages = [tensor.untyped_storage() for tensor in tensors]
        => return 4 * sum(tensor.numel() for tensor in tensors)
    gradients_are_always_there: `grad` is None
        count(p.grad for p in parameters if p.grad is not None) => count(parameters)
    states_are_always_two: bytes of optimizer states
        count(s for s in states if isinstance(s, Tensor)) => 2 * count(parameters)
    no_counts_of_steps: All tensors count
        () for tensor in tensors => () for tensor in tensors if tensor.dim()
    forgets_the_bias: bytes of parameters
        () for tensor in tensors => () for tensor in tensors if tensor.dim() != 1
    across_all_kinds: once in each kind
        storages = [tensor.untyped_storage() for tensor in tensors]
        => storages = [tensor.untyped_storage() for tensor in tensors]
        => storages = [s for s in storages if s.data_ptr() not in counted]
        => counted.update(s.data_ptr() for s in storages)
        parameters = list(model.parameters()) => counted = set()
        => parameters = list(model.parameters())
    numbers_of_python: A Python number has no storage
        ledger = solutions.my_ledger(model, optimizer)
        for state in (s for kept in optimizer.state.values() for s in kept.values()):
            ledger["optimizer states"] += 8 * isinstance(state, int)
        return ledger
    states_by_object: counts once in each kind
        count(s for s in states if isinstance(s, Tensor))
        => sum(s.untyped_storage().nbytes() for s in states if isinstance(s, Tensor))
    parameters_by_first_address: counts once in each kind
        count(parameters)
        => sum(s.nbytes() for s in
        =>     {p.data_ptr(): p.untyped_storage() for p in parameters}.values())
    states_as_views: counts once in each kind
        count(s for s in states if isinstance(s, Tensor))
        => sum(s.nbytes for s in states if isinstance(s, Tensor))
    in_the_first_call_only: start from 0 in every call
        ledger = solutions.my_ledger(model, optimizer)
        for parameter in model.parameters():
            if hasattr(parameter, "counted"):
                ledger["parameters"] = 0
            parameter.counted = True
        return ledger
    gradients_of_trained_ones: and may have a gradient
        for p in parameters if p.grad is not None
        => for p in parameters if p.grad is not None and p.requires_grad
    added_in_float32: All tensors in
        sum({s.data_ptr(): s.nbytes() for s in storages}.values())
        => int(sum(torch.tensor(n).float()
        =>         for n in {s.data_ptr(): s.nbytes() for s in storages}.values()))
    two_floors_deep: in it a view begins
        parameters = list(model.parameters())
        => parameters = list(model.parameters(recurse=False))
        => for child in model.children():
        =>     parameters += child.parameters(recurse=False)
    numbers_are_whole: raised `AttributeError
        isinstance(s, Tensor) => not isinstance(s, int)
    zeroes_the_gradients: changed numbers of the model
        parameters = list(model.parameters())
        => optimizer.zero_grad(set_to_none=False)
        => parameters = list(model.parameters())
    thaws_the_model: or what is trained
        parameters = list(model.parameters())
        => parameters = list(model.requires_grad_().parameters())
    left_in_eval_mode: changed the model's mode
        ledger = solutions.my_ledger(model, optimizer)
        model.eval()
        return ledger
    stops_the_optimizer: `param_groups`
        ledger = solutions.my_ledger(model, optimizer)
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        return ledger
    gradients_of_the_optimizer: and may have a gradient
        count(p.grad for p in parameters if p.grad is not None)
        => count(p.grad for g in optimizer.param_groups for p in g["params"]
        =>       if p.grad is not None)
    states_of_the_first_group: the states of all groups
        optimizer.state.values()
        => [optimizer.state.get(p, {}) for p in optimizer.param_groups[0]["params"]]
    states_of_floats: All tensors in
        isinstance(s, Tensor) => isinstance(s, Tensor) and s.is_floating_point()
    states_of_the_first_time: Start from 0 in every call
        ledger = solutions.my_ledger(model, optimizer)
        if not hasattr(optimizer, "counted"):
            optimizer.counted = ledger["optimizer states"]
        return ledger | {"optimizer states": optimizer.counted}
    only_the_total: expected a dictionary
        return sum(p.nbytes for p in model.parameters())
    makes_gradients: changed gradients or states
        ledger = solutions.my_ledger(model, optimizer)
        for parameter in model.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        return ledger
    """,
    largest_batch="""
    largest_batch_by_trying:
        def kept(rows):
            t, c = config.block_size, config.d_model
            per_token = config.n_layer * (16 * c + 4 + config.n_head)
            per_token += 2 * c + 2 + config.vocab_size
            return 12 * config.num_parameters + 4 * rows * t * per_token

        rows = 0
        while kept(rows + 1) <= memory:
            rows += 1
        return rows
    largest_batch_by_the_formula:
        one, two = (sum(theory.gpt_activations(config, b).values()) for b in (1, 2))
        of_a_row = two - one - 2 * 8 * config.block_size  # without tokens and targets
        left = memory - 12 * config.num_parameters - 8 * config.block_size
        return int(left / of_a_row) if left > 0 else 0
    not_below_zero_forgotten: 0 if not even one row fits
        max(0, (memory - always) // of_a_row) => (memory - always) // of_a_row
    without_heads: a few numbers per token
        + config.n_head =>
    without_norms: a few numbers per token
        16 * c + 4 + config.n_head => 16 * c + config.n_head
        2 * c + 2 => 2 * c
    without_the_last_norm: a few numbers per token
        2 * c + 2 => 2 * c
    no_states: which do not fit
        12 => 4
    gradients_too: would fit
        12 => 16
    no_head: which do not fit
        + of_the_head =>
    no_logits: which do not fit
        + config.vocab_size =>
    plain_attention: not alive at the end of forward
        16 * c + 4 + config.n_head => 16 * c + 4 + config.n_head * (1 + t)
    two_matrices_although_tied: a tied matrix twice
        import dataclasses

        config = dataclasses.replace(config, tied=False)
        return solutions.largest_batch(config, memory)
    in_32_bits: would fit
        (memory - always) => ((memory - always) % 2**32)
    sixteen_bits: which do not fit
        4 * t => 2 * t
    inputs_of_blocks_only: which do not fit
        16 * c + 4 + config.n_head => c
    one_more: which do not fit
        (0, (memory - always) // of_a_row) => (0, (memory - always) // of_a_row) + 1
    one_block: which do not fit
        config.n_layer * =>
    in_tokens: which do not fit
        (0, (memory - always) // of_a_row) => (0, (memory - always) // of_a_row) * t
    below_zero: 0 if not even one row fits
        max(0, (memory - always) // of_a_row) => (memory - always) // of_a_row - 1
    a_search_that_ends_too_low: would fit
        return max(0, (memory - always) // of_a_row)
        => low, high = 0, memory // of_a_row
        => while low < high:
        =>     middle = (low + high) // 2
        =>     if always + middle * of_a_row > memory:
        =>         high = middle
        =>     else:
        =>         low = middle + 1
        => return max(0, low - 1)
    to_the_nearest: which do not fit
        (memory - always) // of_a_row => round((memory - always) / of_a_row)
    a_fraction: expected a whole number
        (0, (memory - always) // of_a_row) => (0, (memory - always) // of_a_row) / 1
    """,
    step_in_backward="""
    one_optimizer_for_all:
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = make_optimizer(trained)

        def hook(parameter):
            optimizer.step()  # the others have no gradient
            parameter.grad = None

        for parameter in trained:
            parameter.register_post_accumulate_grad_hook(hook)
    behind_the_node:
        # Hooks on the nodes of autograd that add to `grad`, as DDP has them.
        model.nodes = []  # autograd itself does not keep them
        for parameter in (p for p in model.parameters() if p.requires_grad):
            model.nodes.append(
                parameter.view_as(parameter).grad_fn.next_functions[0][0]
            )
            optimizer = make_optimizer([parameter])

            def hook(*_, parameter=parameter, optimizer=optimizer):
                optimizer.step()
                parameter.grad = None

            model.nodes[-1].register_hook(hook)
    matrices_alone: stepped once in a step
        optimizers[parameter].step() => if parameter.dim() > 1:
        =>     optimizers[parameter].step()
    keeps_the_gradients: still have a gradient
        optimizers[parameter].zero_grad() => pass
    zeros_in_place_of_none: set a gradient to None
        optimizers[parameter].zero_grad() => parameter.grad.zero_()
    does_nothing: still have a gradient
        in optimizers: => in ():
    frozen_ones_too: RuntimeError
        if p.requires_grad =>
    not_for_zeros: differ from the usual loop's
        optimizers[parameter].step() => if parameter.grad.any():
        =>     optimizers[parameter].step()
    a_new_optimizer_each_time: states kept from step to step
        optimizers[parameter].step() => make_optimizer([parameter]).step()
    keeps_them_in_a_list: What keeps the others?
        zero_grad() => kept = parameter.grad; optimizers[parameter].zero_grad()
    frees_without_a_step: stepped once in a step
        optimizers[parameter].step() => pass
    in_a_hook_of_the_tensor: still have a gradient
        for parameter in (p for p in model.parameters() if p.requires_grad):
            optimizer = make_optimizer([parameter])

            def hook(gradient, parameter=parameter, optimizer=optimizer):
                parameter.grad = gradient
                optimizer.step()
                parameter.grad = None

            parameter.register_hook(hook)
    tied_ones_twice: stepped once in a step
        for _, parameter in model.named_parameters(remove_duplicate=False):
            if parameter.requires_grad:
                optimizer = make_optimizer([parameter])

                def hook(p, optimizer=optimizer):
                    if p.grad is None:
                        p.grad = torch.zeros_like(p)
                    optimizer.step()
                    p.grad = None

                parameter.register_post_accumulate_grad_hook(hook)
    all_at_the_last_one: What keeps the others?
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
    parameters_of_children_alone: still have a gradient
        model.parameters() if p.requires_grad
        => model.parameters() if p.requires_grad and any(
        =>     p is q for child in model.children() for q in child.parameters()
        => )
    """,
)
