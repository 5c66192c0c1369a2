"""The GPT is causal, seeded, cut where its docstring says, and says what is wrong."""

import math
import re

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused
from torch import nn

from ddp_course import model as model_module
from ddp_course.model import (
    GPT,
    PRESETS,
    Attention,
    GPTConfig,
    build_gpt,
    cross_entropy,
)

SMALL = GPTConfig(block_size=16, n_layer=2, n_head=12, d_model=24)


def tokens(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 96, shape, generator=generator)


# The configuration


test_a_model_and_its_loss_name_the_wrong_argument = refused(
    (lambda: model_module.GPT("1m"), "config is '1m'; it must be a GPTConfig"),
    (lambda: model_module.GPT(GPTConfig), "config is .*; it must be a GPTConfig"),
    (lambda: model_module.cross_entropy([1.0], None), "logits is a list; pass a ten"),
    (
        lambda: model_module.cross_entropy(torch.ones(1, 2, 3), torch.ones(1, 2)),
        "targets torch.float32; logits must be floating-point numbers, and targets int",
    ),
)


test_config_names_the_value_and_what_is_allowed = refused(
    (lambda: GPTConfig(vocab_size=0), "size is 0; it must be a whole number >= 1"),
    (lambda: GPTConfig(block_size=-1), "block_size is -1"),
    (lambda: GPTConfig(n_layer=2.0), "n_layer is 2.0"),
    (lambda: GPTConfig(n_head=True), "n_head is True"),
    (lambda: GPTConfig(d_model="144"), "d_model is '144'"),
    (lambda: GPTConfig(d_model=100), "100; .* multiple of n_head, which is 12"),
    (lambda: GPTConfig(tied=1), "tied is 1; it can be True or False"),
)


def test_presets_can_be_cut_by_2_3_4_and_6():
    for config in PRESETS.values():
        for size in (config.vocab_size, config.d_model, config.n_head):
            assert [size % n for n in (2, 3, 4, 6)] == [0, 0, 0, 0]


def test_exact_numbers_of_parameters():
    counts = {name: config.num_parameters for name, config in PRESETS.items()}
    assert counts == {"1m": 1_038_240, "8m": 8_078_400}
    for name, count in counts.items():
        assert sum(p.numel() for p in build_gpt(name).parameters()) == count
        assert f"{count:,}" in model_module.__doc__


@given(
    st.builds(
        lambda heads, width, **rest: GPTConfig(
            n_head=heads, d_model=heads * width, **rest
        ),
        heads=st.integers(1, 4),
        width=st.integers(1, 4),
        vocab_size=st.integers(1, 9),
        block_size=st.integers(1, 9),
        n_layer=st.integers(1, 3),
        tied=st.booleans(),
    )
)
@settings(max_examples=25, deadline=None)
def test_closed_form_counts_every_parameter_once(config):
    assert sum(p.numel() for p in GPT(config).parameters()) == config.num_parameters


def test_docstring_lists_every_parameter_with_its_shape():
    row = re.compile(r"^ +([\w.]+\.(?:weight|bias)) +\(([\d, ]+)\) +([\d,]+)", re.M)
    results = {}
    for name, shape, count in row.findall(model_module.__doc__):
        results[name] = tuple(int(n) for n in re.findall(r"\d+", shape))
        assert math.prod(results[name]) == int(count.replace(",", ""))
    model = build_gpt("1m")
    true = {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert results == {
        k: v for k, v in true.items() if not re.match(r"blocks\.[1-9]", k)
    }
    for i in (1, 2, 3):
        assert all(
            true[name.replace("blocks.0.", f"blocks.{i}.")] == shape
            for name, shape in results.items()
        )


def test_docstring_lists_every_activation_with_its_shape():
    rows = re.findall(r"^ +([a-z].*?)  +\((8, [\d, ]+)\)", model_module.__doc__, re.M)
    results = {name: tuple(int(n) for n in shape.split(",")) for name, shape in rows}
    model, seen = build_gpt("1m"), {}
    for name, module in model.named_modules():
        if name in results:
            module.register_forward_hook(
                lambda _m, _args, out, name=name: seen.update({name: tuple(out.shape)})
            )
    model(tokens(8, 64))
    b, t, h, d = 8, 64, 12, 12
    seen["q, k and v each"] = seen["mixed values"] = (b, h, t, d)
    seen["attention weights"] = (b, h, t, t)
    assert results == seen


def test_attention_weights_are_never_stored():
    shapes = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda saved: (shapes.append(tuple(saved.shape)), saved)[1], lambda saved: saved
    ):
        build_gpt("1m")(tokens(2, 64))
    assert (2, 12, 64, 12) in shapes  # q, k and v are
    assert not [shape for shape in shapes if shape[-2:] == (64, 64)]


# Where the weights come from


def draws_its_own_random_numbers(build):
    """Same weights whatever the global generator; and that generator not moved."""
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    first = build(SMALL, seed=0).state_dict()
    undisturbed = torch.equal(before, torch.random.get_rng_state())
    torch.manual_seed(2)
    second = build(SMALL, seed=0).state_dict()
    other = build(SMALL, seed=1).state_dict()
    return (
        undisturbed
        and all(torch.equal(first[name], second[name]) for name in first)
        and not torch.equal(first["head.out.weight"], other["head.out.weight"])
    )


def seeds_the_global_generator(config, seed):
    torch.manual_seed(seed)
    return GPT(config)


def ignores_the_seed(config, seed):
    with torch.random.fork_rng(devices=[]):
        return GPT(config)


def always_the_same(config, seed):
    return build_gpt(config, seed=0)


WRONG_SEEDS = seeds_the_global_generator, ignores_the_seed, always_the_same


@pytest.mark.parametrize("build", [build_gpt, *WRONG_SEEDS])
def test_the_seed_alone_makes_the_weights_and_others_are_caught(build):
    assert draws_its_own_random_numbers(build) == (build is build_gpt)


def test_build_takes_a_name_or_a_config_and_stays_on_the_cpu():
    with torch.device("meta"):
        model = build_gpt(SMALL)
    assert {p.device.type for p in model.parameters()} == {"cpu"}
    assert build_gpt("8m").config == PRESETS["8m"]
    with pytest.raises(ValueError, match="'2m'; it can be '1m', '8m' or a GPTConfig"):
        build_gpt("2m")


def test_weights_start_small_and_the_loss_near_log_of_the_vocabulary():
    model = build_gpt("1m")
    for name, parameter in model.named_parameters():
        if "bias" in name:
            assert not parameter.any()
        elif "norm" in name:
            assert (parameter == 1).all()
        else:
            last = name.endswith(("proj.weight", "down.weight"))
            expected = 0.02 / math.sqrt(8) if last else 0.02
            assert parameter.std().item() == pytest.approx(expected, rel=0.05)
    _, loss = model(tokens(8, 64), tokens(8, 64, seed=1))
    assert loss.item() == pytest.approx(math.log(96), abs=0.1)


def test_tied_means_one_matrix():
    model = build_gpt(GPTConfig(n_layer=1, tied=True))
    assert model.head.out.weight is model.embed.tokens.weight
    free = build_gpt(GPTConfig(n_layer=1))
    assert model.config.num_parameters == free.config.num_parameters - 96 * 144


# What forward computes


def uses_only_the_past(model):
    """Changing the token at place t changes no logit before t, and the one at t."""
    idx = tokens(2, 16)
    before, _ = model(idx)
    for t in range(16):
        changed = idx.clone()
        changed[:, t] = (changed[:, t] + 1) % 96
        after, _ = model(changed)
        if not torch.equal(before[:, :t], after[:, :t]):
            return False
        if torch.equal(before[:, t], after[:, t]):
            return False
    return True


def heads(attention, x):
    """Return q, k and v as the model's attention cuts them: (B, h, T, d_head) each."""
    qkv = attention.qkv(x).unflatten(-1, (-1, 3, attention.d_head))
    return qkv.permute(3, 0, 2, 1, 4)


class SeesTheFuture(Attention):
    def forward(self, x):
        y = F.scaled_dot_product_attention(*heads(self, x))  # planted: no mask
        return self.proj(y.transpose(1, 2).flatten(2))


class SeesOneStepAhead(Attention):
    def forward(self, x):
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril(1)  # planted
        y = F.scaled_dot_product_attention(*heads(self, x), attn_mask=mask)
        return self.proj(y.transpose(1, 2).flatten(2))


class MixesHeadsAndTime(Attention):
    def forward(self, x):
        y = F.scaled_dot_product_attention(*heads(self, x), is_causal=True)
        return self.proj(y.reshape(x.shape))  # planted: no transpose back


LEAKS = SeesTheFuture, SeesOneStepAhead, MixesHeadsAndTime


@pytest.mark.parametrize("attention", [Attention, *LEAKS])
def test_no_logit_depends_on_the_future_and_a_leak_is_caught(attention):
    model = build_gpt(SMALL)
    for block in model.blocks:
        block.attn.__class__ = attention
    assert uses_only_the_past(model) == (attention is Attention)


def test_order_of_the_past_matters():
    model = build_gpt(SMALL)
    swapped = tokens(1, 16)[:, [1, 0, *range(2, 16)]]
    assert not torch.equal(model(tokens(1, 16))[0][:, -1], model(swapped)[0][:, -1])


def test_loss_is_the_mean_over_all_characters():
    idx, targets = tokens(3, 16), tokens(3, 16, seed=1)
    logits, loss = build_gpt(SMALL)(idx, targets)
    assert logits.shape == (3, 16, 96)
    p = logits.softmax(-1).gather(-1, targets[..., None])
    torch.testing.assert_close(loss, -p.log().mean())
    assert build_gpt(SMALL)(idx)[1] is None


@pytest.mark.parametrize("tied", [False, True])
def test_every_parameter_gets_a_gradient(tied):
    model = build_gpt(GPTConfig(block_size=16, n_layer=2, d_model=24, tied=tied))
    model(tokens(8, 16), tokens(8, 16, seed=1))[1].backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad.any(), name


# Where later chapters cut


def test_the_layers_in_a_row_are_the_model():
    model = build_gpt(SMALL)
    layers = [model.embed, *model.blocks, model.head]
    stages = nn.Sequential(*layers[:2]), nn.Sequential(*layers[2:])
    idx, targets = tokens(2, 16), tokens(2, 16, seed=1)
    logits, loss = model(idx, targets)
    assert torch.equal(stages[1](stages[0](idx)), logits)
    assert torch.equal(cross_entropy(logits, targets), loss)


def can_be_cut_by_heads(attention, config, n):
    """With 1/n of qkv's rows and proj's columns each, the parts sum to the whole."""
    full = attention(config)
    x = torch.randn(2, 16, config.d_model)
    total = full.proj.bias
    rows, columns = full.qkv.weight.chunk(n, dim=0), full.proj.weight.chunk(n, dim=1)
    for mine_in, mine_out in zip(rows, columns, strict=True):
        part = attention(config)
        part.qkv.weight = nn.Parameter(mine_in)  # (3C/n, C)
        part.proj.weight = nn.Parameter(mine_out)  # (C, C/n)
        part.proj.bias = None
        total = total + part(x)
    whole = full(x)
    return whole.shape == total.shape and torch.allclose(whole, total, atol=1e-5)


class AllQueriesFirst(Attention):
    """Planted: the usual q | k | v layout, whose contiguous cuts are not heads."""

    def forward(self, x):
        qkv = self.qkv(x).unflatten(-1, (3, -1, self.d_head))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("n", [1, 2, 3, 4, 6, 12])
def test_attention_can_be_cut_by_heads(n):
    torch.manual_seed(0)
    assert can_be_cut_by_heads(Attention, PRESETS["1m"], n)


@pytest.mark.parametrize("n", [2, 3, 4])
def test_another_layout_could_not(n):
    torch.manual_seed(0)
    assert can_be_cut_by_heads(AllQueriesFirst, PRESETS["1m"], 1)
    assert not can_be_cut_by_heads(AllQueriesFirst, PRESETS["1m"], n)


# Bad input


@pytest.mark.parametrize(
    ("idx", "error", "message"),
    [
        (torch.zeros(1, 17, dtype=torch.int64), ValueError, r"\(1, 17\).* 1 to 16"),
        (torch.zeros(16, dtype=torch.int64), ValueError, r"idx has shape \(16,\)"),
        (torch.zeros(0, 16, dtype=torch.int64), ValueError, r"\(0, 16\).*B >= 1"),
        (torch.zeros(1, 16, dtype=torch.int32), TypeError, "idx is torch.int32"),
        (torch.zeros(1, 16), TypeError, "idx is torch.float32; .* torch.int64"),
        (torch.full((1, 16), 96), ValueError, "idx holds the token 96; .* 0 to 95"),
        (torch.full((1, 16), -1), ValueError, "idx holds the token -1"),
    ],
)
def test_bad_tokens_get_a_clear_error(idx, error, message):
    with pytest.raises(error, match=message):
        build_gpt(SMALL)(idx)


def test_bad_targets_get_a_clear_error():
    model, idx = build_gpt(SMALL), tokens(2, 16)
    with pytest.raises(
        ValueError, match=r"shape \(2, 15\); for these logits it must be \(2, 16"
    ):
        model(idx, idx[:, 1:])
    with pytest.raises(ValueError, match="targets holds the token -100"):
        model(idx, torch.full_like(idx, -100))  # F.cross_entropy would skip it silently
