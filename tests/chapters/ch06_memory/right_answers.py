"""Right answers to the exercises of chapter 06, in other styles than the solutions."""

from ddp_course import theory


def my_ledger_by_object(model, optimizer):
    parameters = list(model.parameters())
    kinds = {
        "parameters": parameters,
        "gradients": [p.grad for p in parameters if p.grad is not None],
        "optimizer states": [
            t for p in parameters for t in optimizer.state.get(p, {}).values()
        ],
    }
    return {
        kind: sum(s.nbytes() for s in {t.untyped_storage() for t in tensors})
        for kind, tensors in kinds.items()
    }


def my_ledger_in_one_loop(model, optimizer):
    told = dict.fromkeys(("parameters", "gradients", "optimizer states"), 0)
    seen = set()

    def add(kind, tensor):
        place = kind, tensor.untyped_storage().data_ptr()
        told[kind] += (place not in seen) * tensor.untyped_storage().nbytes()
        seen.add(place)

    for parameter in model.parameters():
        add("parameters", parameter)
        if parameter.grad is not None:
            add("gradients", parameter.grad)
        if parameter in optimizer.state:
            for state in optimizer.state[parameter].values():
                if hasattr(state, "untyped_storage"):
                    add("optimizer states", state)
    return told


def largest_batch_by_trying(config, memory):
    def kept(rows):
        t, c = config.block_size, config.d_model
        per_token = config.n_layer * (16 * c + 4 + config.n_head)
        per_token += 2 * c + 2 + config.vocab_size
        return 12 * config.num_parameters + 4 * rows * t * per_token

    rows = 0
    while kept(rows + 1) <= memory:
        rows += 1
    return rows


def largest_batch_by_the_formula(config, memory):
    one, two = (sum(theory.gpt_activations(config, b).values()) for b in (1, 2))
    of_a_row = two - one - 2 * 8 * config.block_size  # without tokens and targets
    left = memory - 12 * config.num_parameters - 8 * config.block_size
    return int(left / of_a_row) if left > 0 else 0


def one_optimizer_for_all(model, make_optimizer):
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = make_optimizer(trained)

    def hook(parameter):
        optimizer.step()  # the others have no gradient
        parameter.grad = None

    for parameter in trained:
        parameter.register_post_accumulate_grad_hook(hook)


def behind_the_node(model, make_optimizer):
    """Hooks on the nodes of autograd that add to `grad`, as DDP has them."""
    model.nodes = []  # autograd itself does not keep them
    for parameter in (p for p in model.parameters() if p.requires_grad):
        model.nodes.append(parameter.view_as(parameter).grad_fn.next_functions[0][0])
        optimizer = make_optimizer([parameter])

        def hook(*_, parameter=parameter, optimizer=optimizer):
            optimizer.step()
            parameter.grad = None

        model.nodes[-1].register_hook(hook)


RIGHT = {
    "my_ledger": [my_ledger_by_object, my_ledger_in_one_loop],
    "largest_batch": [largest_batch_by_trying, largest_batch_by_the_formula],
    "step_in_backward": [one_optimizer_for_all, behind_the_node],
}
