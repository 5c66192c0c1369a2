"""Cached keys and values change no token: in one process, or with some heads each."""

from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from on_ranks import launched

from ddp_course.context_parallel.gpt import context_parallel
from ddp_course.data import load_corpus
from ddp_course.generation import KeyValueCache, generate, generate_naively
from ddp_course.measure import TorchCollectives
from ddp_course.model import GPTConfig, build_gpt
from ddp_course.tensor_parallel import tensor_parallel

SMALL = GPTConfig(block_size=32, n_layer=3, n_head=6, d_model=48)
PROMPT, NEW = load_corpus().batch(0, 4, 9)[0], 23  # all 32 positions, and one token


def model(config: GPTConfig = SMALL):
    """Return a GPT whose attention and positions matter for its next token."""
    gpt = build_gpt(config, seed=3)
    with torch.no_grad():
        for parameter in gpt.parameters():
            parameter *= 4 if parameter.ndim == 2 else 1
    return gpt


def test_the_cached_tokens_are_those_of_whole_forwards():
    gpt = model()
    text = generate_naively(gpt, PROMPT, NEW)
    assert text.shape == (4, 32) and torch.equal(text[:, :9], PROMPT)
    assert len(text[:, 9:].unique()) > 10  # no model that repeats one token
    assert torch.equal(generate(gpt, PROMPT, NEW), text)


def gap(chunks: list[int]) -> float:
    """Return how far the logits of a text in chunks are from those of a whole one."""
    gpt, idx = model(), load_corpus().batch(1, 2, 32)[0]
    cache = KeyValueCache(gpt)
    with torch.no_grad():
        logits = [cache(part)[0] for part in idx.split(chunks, 1)]
        return (torch.cat(logits, 1) - gpt(idx)[0]).abs().max().item()


@pytest.mark.parametrize("chunks", [[32], [1] * 32, [9, 1, 1, 13, 8], [31, 1]])
def test_logits_are_the_same_in_chunks_of_any_size(chunks):
    assert gap(chunks) < 1e-3


def alone(self, attention, q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def without_offset(self, attention, q, k, v):
    keys, values = self.kept.get(attention, (k[:, :, :0], v[:, :, :0]))
    k, v = torch.cat([keys, k], 2), torch.cat([values, v], 2)
    self.kept[attention] = k, v
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def newest_first(self, attention, q, k, v):
    keys, values = self.kept.get(attention, (k[:, :, :0], v[:, :, :0]))
    k, v = torch.cat([k, keys], 2), torch.cat([values, v], 2)
    self.kept[attention] = k, v
    return F.scaled_dot_product_attention(q, k, v)


@pytest.mark.parametrize("wrong", [alone, without_offset, newest_first])
def test_a_wrong_attention_is_seen(wrong):
    with patch.object(KeyValueCache, "attend", wrong):
        assert gap([9, *[1] * 23]) > 0.1
        assert not torch.equal(
            generate(model(), PROMPT, NEW), generate_naively(model(), PROMPT, NEW)
        )


def test_forgotten_positions_are_seen():
    with patch.object(KeyValueCache, "_shift", lambda self, module, args: args):
        assert gap([9, *[1] * 23]) > 0.1


def test_two_caches_share_a_model_and_leave_it_as_it_was():
    gpt = model()
    first, second = KeyValueCache(gpt), KeyValueCache(gpt)
    a, b = load_corpus().batch(2, 2, 8)[0].split(1)
    with torch.no_grad():
        for part in zip(a.split(4, 1), b.split(4, 1), strict=True):
            logits = first(part[0])[0], second(part[1])[0]
        for text, its in zip((a, b), logits, strict=True):
            torch.testing.assert_close(its, gpt(text)[0][:, 4:], rtol=0, atol=1e-3)
    assert not gpt.embed.positions._forward_pre_hooks
    assert "attend" not in vars(gpt.blocks[0].attn)


def test_bytes_are_two_numbers_per_channel_layer_and_position():
    cache = KeyValueCache(model())
    with torch.no_grad():
        cache(PROMPT)
        assert cache.nbytes == 2 * 3 * 48 * 4 * 9 * len(PROMPT)
        cache(PROMPT[:, :1])
    assert cache.nbytes == 2 * 3 * 48 * 4 * 10 * len(PROMPT)


@pytest.mark.parametrize("new", [0, -1, 25])
def test_too_many_or_no_tokens_are_refused(new):
    for way in (generate, generate_naively):
        with pytest.raises(ValueError, match=f"new_tokens is {new}.* 1 to 24"):
            way(model(), PROMPT, new)


# ---- tensor parallel -----------------------------------------------------------------


def shared():
    parallel = tensor_parallel(model())
    text, cache = generate(parallel, PROMPT, NEW), KeyValueCache(parallel)
    with torch.no_grad():
        cache(PROMPT)
        with TorchCollectives() as torch_log:
            cache(PROMPT[:, :1])
    return text, cache.nbytes, sum(call.bytes_sent for call in torch_log.calls)


def test_wrong_arguments_of_generate_are_named():
    gpt = model()
    for words, *arguments in (
        ("model has no config.block_size; it must be the course", None, PROMPT, 2),
        (r"idx is torch.int64 \(.*; it must be an int64 tensor", gpt, PROMPT[0], 2),
        (r"idx is str; it must be an int64 tensor of shape \(B, T", gpt, "abc", 2),
        ("new_tokens is 2.5; it must be an integer", gpt, PROMPT, 2.5),
    ):
        with pytest.raises(ValueError, match=words):
            generate(*arguments)
    with pytest.raises(ValueError, match="model is None; it must be an nn.Module"):
        KeyValueCache(None)


def refused():
    with pytest.raises(ValueError, match="context parallel"):
        generate(context_parallel(model()), PROMPT, NEW)
    return True


ranks = launched((2, 3), shared, refused)


def test_each_rank_caches_its_heads_and_all_find_the_same_tokens(ranks):
    text, n = generate_naively(model(), PROMPT, NEW), len(ranks["shared"])
    for its_text, nbytes, _ in ranks["shared"]:
        assert torch.equal(its_text, text)
        assert nbytes == 2 * 3 * (48 // n) * 4 * 10 * len(PROMPT)


def test_a_token_sends_two_sums_a_block_one_for_its_embedding_and_its_logits(ranks):
    n, rows = len(ranks["shared"]), len(PROMPT)
    sums, logits = (2 * 3 + 1) * 48, SMALL.vocab_size
    for _, _, sent in ranks["shared"]:
        assert sent == pytest.approx((2 * sums + logits) * 4 * rows * (n - 1) / n)


def test_a_divided_sequence_is_refused(ranks):
    assert all(ranks["refused"])
