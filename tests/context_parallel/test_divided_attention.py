"""Attention over a divided sequence: one process's outputs, gradients and bytes."""

from itertools import product
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from on_ranks import error_of

from ddp_course.context_parallel import ring
from ddp_course.context_parallel.assignment import (
    ASSIGNMENTS,
    assign,
    padded_length,
    pairs,
    work,
)
from ddp_course.context_parallel.naive import gathered_attention
from ddp_course.context_parallel.online_softmax import attend, merge
from ddp_course.context_parallel.ring import Ring
from ddp_course.context_parallel.ulysses import ulysses_attention
from ddp_course.launch import spawn
from ddp_course.measure import ByteMeter, TorchCollectives
from ddp_course.theory import attention_volume, causal_pairs

B, H, D, T = 2, 12, 8, 48
HEADS_OF_KEYS = {1: (12, 4), 2: (12, 4), 3: (12, 6)}
TINY = {torch.float64: 1e-11, torch.bfloat16: 0.3}  # gradients are up to some 30


def tensors(heads_of_keys, dtype=torch.float64):
    """Return q, k, v and a gradient of the output, whole; scores up to some 60."""
    random = torch.Generator().manual_seed(1)
    heads = (H, heads_of_keys, heads_of_keys, H)
    draw = [torch.randn(B, h, T, D, generator=random).to(dtype) for h in heads]
    draw[1] *= 6
    return draw


def on_one_process(q, k, v, dout):
    whole = [x.clone().requires_grad_() for x in (q, k, v)]
    grouped = {"enable_gqa": k.shape[1] != H}
    out = F.scaled_dot_product_attention(*whole, is_causal=True, **grouped)
    out.backward(dout)
    return [out.detach(), *(x.grad for x in whole)]


def divided(how, assignment, heads_of_keys, dtype=torch.float64):
    """Return the errors of output and gradients, and the bytes sent, both ways."""
    assigned = assign(T, dist.get_world_size(), assignment)
    at = [torch.tensor([i for some in ranges for i in some]) for ranges in assigned]
    *qkv, dout = tensors(heads_of_keys, dtype)
    mine = at[dist.get_rank()]
    parts = [x[:, :, mine].clone().requires_grad_() for x in qkv]
    calls = {
        "ring": lambda: Ring(assigned)(*parts),
        "naive": lambda: gathered_attention(*parts, at),
        "ulysses": lambda: ulysses_attention(*parts),
    }
    with ByteMeter() as meter, TorchCollectives() as collectives:
        out = calls[how]()
    forward = meter.total_sent + sum(c.bytes_sent for c in collectives.calls)
    with ByteMeter() as meter, TorchCollectives() as collectives:
        out.backward(dout[:, :, mine])
    backward = meter.total_sent + sum(c.bytes_sent for c in collectives.calls)
    found = [out.detach(), *(x.grad for x in parts)]
    pairs_of = zip(found, on_one_process(*qkv, dout), strict=True)
    errors = [float((one - all_[:, :, mine]).abs().max()) for one, all_ in pairs_of]
    return errors, (forward, backward)


WAYS = [("ring", kind) for kind in ASSIGNMENTS]
WAYS += [("naive", "contiguous"), ("naive", "zigzag"), ("ulysses", "contiguous")]


def every_way(n):
    """Return what `divided` does, for each way, number of heads of keys, and type."""
    return {
        (*way, heads, dtype): divided(*way, heads, dtype)
        for way in WAYS
        for heads in HEADS_OF_KEYS[n]
        for dtype in TINY
    }


@pytest.mark.parametrize("n", HEADS_OF_KEYS)
def test_spawn_outputs_gradients_and_bytes(n):
    sizes = {"batch": B, "length": T, "heads": H, "d_head": D}
    for rank in spawn(every_way, n, world_size=n, output="none"):
        for (how, _, heads, dtype), (errors, sent) in rank.items():
            assert max(errors) < TINY[dtype]
            name = {"naive": "gathered"}.get(how, how)
            more = {"kv_heads": heads, "itemsize": dtype.itemsize}
            volume = attention_volume(name, n, **sizes, **more)
            assert sent == (volume.forward, volume.backward), how


# ---- plants: each is a mistake that somebody has made --------------------------------


def with_keys_of_the_wrong_step():
    """Backward computes with the next step's keys: the forward is right."""
    right = ring.attend_backward
    step = iter(range(100))

    def stale(q, k, v, *others):
        k = k if next(step) == 0 else k.roll(1, dims=-2)
        return right(q, k, v, *others)

    ring.attend_backward = stale
    return divided("ring", "contiguous", H)[0]


def with_the_softmax_of_a_block():
    """Backward takes each block for a softmax of its own."""
    right = ring.attend_backward

    def alone(q, k, v, visible, lse, dout, delta):
        out, lse = attend(q, k, v, visible)
        return right(q, k, v, visible, lse, dout, (dout * out).sum(-1))

    ring.attend_backward = alone
    return divided("ring", "contiguous", H)[0]


def with_the_mean_of_outputs():
    """Blocks weigh alike, however large their exponentials are."""
    ring.merge = lambda out1, lse1, out2, lse2: ((out1 + out2) / 2, lse2)
    return divided("ring", "contiguous", H)[0]


@pytest.mark.parametrize(
    ("plant", "forward_is_right"),
    [
        (with_keys_of_the_wrong_step, True),
        (with_the_softmax_of_a_block, True),
        (with_the_mean_of_outputs, False),
    ],
)
def test_spawn_a_wrong_ring_is_seen(plant, forward_is_right):
    errors = spawn(plant, world_size=2, output="none")
    assert (max(rank[0] for rank in errors) < 1e-11) == forward_is_right
    assert max(max(rank[1:]) for rank in errors) > 1e-3


def in_bfloat16():
    """Return the output's largest error: the ring's, and that of one process."""
    *qkv, _ = tensors(H)
    qkv = [x.bfloat16() for x in qkv]
    exact = F.scaled_dot_product_attention(*(x.double() for x in qkv), is_causal=True)
    assigned = assign(T, dist.get_world_size(), "contiguous")
    mine = slice(assigned[dist.get_rank()][0].start, assigned[dist.get_rank()][0].stop)
    whole = F.scaled_dot_product_attention(*qkv, is_causal=True)[:, :, mine]
    ours = Ring(assigned)(*(x[:, :, mine].contiguous() for x in qkv))
    return [float((out - exact[:, :, mine]).abs().max()) for out in (ours, whole)]


def test_spawn_bfloat16_is_merged_in_float32():
    for ours, whole in spawn(in_bfloat16, world_size=4, output="none"):
        assert ours < 1.2 * whole


# ---- the pieces ----------------------------------------------------------------------


def scores(*numbers):
    return torch.tensor(numbers, dtype=torch.float64)[None, :, None]


def check_merge(merge, far):
    """A merge of two blocks is attention to both, with scores of this size."""
    q = torch.ones(1, 1, 1, dtype=torch.float64)
    k, v = scores(far, -far, far / 2, 0), scores(1, 2, 3, 4)
    whole, lse = attend(q, k, v)
    merged = merge(*attend(q, k[:, :2], v[:, :2]), *attend(q, k[:, 2:], v[:, 2:]))
    torch.testing.assert_close(merged, (whole, lse), rtol=1e-12, atol=0)


def by_definition(out1, lse1, out2, lse2):
    """The plant: e^lse is inf from 710 on."""
    first, second = lse1.exp()[..., None], lse2.exp()[..., None]
    out = (first * out1 + second * out2) / (first + second)
    return out, (lse1.exp() + lse2.exp()).log()


def test_merge_is_exact_where_exponentials_overflow():
    for far in (1.0, 300.0, 3e4):
        check_merge(merge, far)
    check_merge(by_definition, 1.0)
    with pytest.raises(AssertionError):
        check_merge(by_definition, 3e4)


def test_a_query_that_sees_no_key_takes_the_other_block():
    q = torch.ones(1, 1, 1, dtype=torch.float64)
    nothing = attend(q, q, q, torch.zeros(1, 1, dtype=torch.bool))
    something = attend(q, q, 2 * q)
    for blocks in ((*nothing, *something), (*something, *nothing)):
        torch.testing.assert_close(merge(*blocks), something)
    out, lse = merge(*nothing, *nothing)
    assert out == 0 and lse == -torch.inf  # not nan


# ---- who has which positions ---------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("assignment", ASSIGNMENTS)
def test_every_position_is_assigned_once_and_the_work_is_the_formulas(n, assignment):
    length = 48
    assigned = assign(length, n, assignment)
    flat = sorted(p for ranges in assigned for some in ranges for p in some)
    assert flat == list(range(length))
    assert work(assigned) == causal_pairs(assignment, length, n)


def test_pairs_counts_what_a_mask_shows():
    queries, keys = (1, 4, 9), (0, 2, 4, 5)
    visible = torch.tensor(queries)[:, None] >= torch.tensor(keys)
    assert pairs(queries, keys) == int(visible.sum()) == 8


@pytest.mark.parametrize("assignment", ASSIGNMENTS)
def test_a_ring_counts_its_pairs_without_masks(assignment):
    for rank, source in product(range(3), repeat=2):
        # An object without the method `blocks`, which computes the masks
        own = SimpleNamespace(assigned=assign(24, 3, assignment), rank=rank)
        blocks = Ring.blocks(own, source, torch.device("cpu"))
        sizes = [(r.stop - r.start) * (c.stop - c.start) for r, c, _ in blocks]
        assert Ring.pairs(own, source) == sum(sizes)


def gradients_of_gradients():
    """Return what a second derivative raises, for each way to attend."""
    ways = {"ring": Ring(assign(8, 2)), "ulysses": ulysses_attention}
    found = {}
    for name, way in ways.items():
        x = torch.randn(1, 2, 4, 3, requires_grad=True)
        (first,) = torch.autograd.grad(way(x, x, x).pow(2).sum(), x, create_graph=True)
        found[name] = error_of(first.sum().backward)
    return found


def test_spawn_a_second_derivative_is_refused():
    for found in spawn(gradients_of_gradients, world_size=2, output="none"):
        for error in found.values():
            assert "marked with @once_differentiable" in error


def test_an_lse_of_another_shape_is_refused():
    out, lse = torch.ones(1, 2, 4, 3), torch.ones(1, 2, 4, 1)
    with pytest.raises(ValueError, match=r"an lse has shape \(1, 2, 4, 1\); for outp"):
        merge(out, lse[..., 0], out, lse)


def test_what_cannot_be_assigned_is_refused():
    with pytest.raises(ValueError, match="length is 50; zigzag over 4 ranks .* of 8"):
        assign(50, 4)
    with pytest.raises(ValueError, match="assignment is 'zag'; it can be contiguous"):
        assign(48, 4, "zag")
    with pytest.raises(ValueError, match="assignment is 'zag'; it can be contiguous"):
        padded_length(48, 4, "zag")
    for n in (0, -1):
        with pytest.raises(ValueError, match=f"num_ranks {n}; both must be 1 or more"):
            assign(48, n)
    assert padded_length(50, 4, "zigzag") == 56
    assert padded_length(50, 4, "striped") == 52


def too_many_ranks():
    try:
        divided("ulysses", "contiguous", 4)
    except ValueError as error:
        return str(error)


def test_spawn_heads_that_cannot_be_shared_are_refused():
    for text in spawn(too_many_ranks, world_size=3, output="none"):
        assert "k has 4 heads, which 3 ranks cannot share equally" in text
