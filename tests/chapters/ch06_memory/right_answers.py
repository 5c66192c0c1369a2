"""Right answers to the exercises of chapter 06, in other styles than the solutions."""


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


def one_optimizer_for_all(model, make_optimizer):
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = make_optimizer(trained)

    def hook(parameter):
        optimizer.step()  # the others have no gradient
        parameter.grad = None

    for parameter in trained:
        parameter.register_post_accumulate_grad_hook(hook)


RIGHT = {
    "my_ledger": [my_ledger_by_object],
    "largest_batch": [largest_batch_by_trying],
    "step_in_backward": [one_optimizer_for_all],
}
