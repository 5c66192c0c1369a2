"""The hard models are as hard as their names say."""

from ddp_course.lab.hard import hard_models

MODELS = {name: model for name, model, _ in hard_models()}


def test_models():
    for name, model, x in hard_models():
        assert model(x).shape == (3, 4)
        model(x).sum().backward()
        for parameter in model.parameters():
            assert (parameter.grad is not None) == parameter.requires_grad, name
    frozen = [one.requires_grad for one in MODELS["a frozen layer"].parameters()]
    assert frozen == [False, False, True, True]
    assert len(list(MODELS["a tied weight"].parameters())) == 3
    buffers = MODELS["a buffer of whole numbers and one that is not saved"]
    assert len(list(buffers.buffers())) == 2
    assert "table" not in buffers.state_dict()
    assert not MODELS["a strided weight"].last.weight.is_contiguous()
    assert MODELS["an empty parameter"].nothing.numel() == 0
