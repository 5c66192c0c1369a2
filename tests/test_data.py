"""The corpus is the same for everyone, and its shards are the batch, each row once."""

import string

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused

from ddp_course.data import (
    MIN_CHARS,
    VOCABULARY,
    Corpus,
    CorpusError,
    decode,
    encode,
    load_corpus,
    shard,
)
from ddp_course.model import GPTConfig

# Characters and tokens


def test_vocabulary_is_newline_and_printable_ascii():
    assert len(VOCABULARY) == len(set(VOCABULARY)) == GPTConfig().vocab_size == 96
    printable = set(string.digits + string.ascii_letters + string.punctuation + " \n")
    assert set(VOCABULARY) == printable
    assert encode(VOCABULARY).tolist() == list(range(96))


@given(st.text())
def test_one_character_is_one_token_and_comes_back(text):
    tokens = encode(text)
    assert tokens.shape == (len(text),)
    assert tokens.dtype == torch.int64
    expected = "".join(c if c in VOCABULARY else "?" for c in text)
    assert decode(tokens) == expected
    assert decode(encode(expected)) == expected


def test_what_is_not_in_the_vocabulary_becomes_a_question_mark():
    assert decode(encode("a\tb\r\x00é中😀\ud800\x7f?")) == "a?b????????"


def test_decode_takes_any_shape_and_refuses_other_tokens():
    assert decode(torch.tensor([[34, 35], [0, 36]], dtype=torch.uint8)) == "AB\nC"
    for wrong in (torch.tensor([96]), torch.tensor([-1]), torch.tensor([256 + 34])):
        with pytest.raises(ValueError, match=f"{int(wrong)}; tokens are 0 to 95"):
            decode(wrong)
    with pytest.raises(TypeError, match="torch.float32; it must be of an integer type"):
        decode(torch.tensor([1.0]))


# Loading


def write(folder, **files):
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text, encoding="utf-8")
    return folder


def test_standard_library_fills_the_corpus():
    corpus = load_corpus()
    assert corpus.tokens.shape == (1_000_000,)
    assert corpus.tokens.dtype == torch.uint8
    assert (len(corpus.train), len(corpus.validation)) == (900_000, 100_000)
    assert "import" in corpus.text
    assert torch.equal(encode(corpus.text), corpus.tokens.long())
    assert load_corpus() is corpus
    load_corpus.cache_clear()
    assert torch.equal(load_corpus().tokens, corpus.tokens)


def test_files_are_read_in_order_of_their_names(tmp_path, monkeypatch):
    monkeypatch.setattr("ddp_course.data.MAX_CHARS", 10_000)
    write(tmp_path, b="B" * 9000, a="é" * 4000, c="never reached")
    write(tmp_path, _sysconfigdata__linux_="written by the build")
    (tmp_path / "0.txt").write_text("not python")
    (tmp_path / "0").mkdir()
    write(tmp_path / "0", inner="not entered")
    corpus = load_corpus(tmp_path)
    assert corpus.text == "?" * 4000 + "B" * 6000
    assert len(corpus.train) == 9000


def test_bytes_that_are_not_utf8_do_no_harm(tmp_path):
    (tmp_path / "a.py").write_bytes(b"\xff" + b"x" * MIN_CHARS)
    assert load_corpus(str(tmp_path)).text == "?" + "x" * MIN_CHARS


def test_missing_or_short_sources_say_what_to_do(tmp_path):
    with pytest.raises(CorpusError, match=r"0 \*\.py files.*call load_corpus.folder="):
        load_corpus(tmp_path)
    with pytest.raises(CorpusError, match="nowhere: nothing. Some small Pythons"):
        load_corpus(tmp_path / "nowhere")
    write(tmp_path, a="x" * (MIN_CHARS - 1))
    with pytest.raises(CorpusError, match="at least 10,000 characters.*1 .*, 9,999 "):
        load_corpus(tmp_path)


def test_a_python_without_sources_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    load_corpus.cache_clear()
    with pytest.raises(CorpusError, match="Python's standard library"):
        load_corpus()


# Batches

COUNTING = Corpus(torch.arange(90, dtype=torch.uint8), train_size=60)


def is_a_pure_function(batch):
    """Same arguments, same bits, whatever the global generators; other steps differ."""
    torch.manual_seed(0)
    np.random.seed(0)
    first = batch(3, 8, 16, seed=1)
    second = batch(3, 8, 16, seed=1)
    others = batch(4, 8, 16, seed=1), batch(3, 8, 16, seed=2), batch(1, 8, 16, seed=3)
    same = all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    return same and not any(torch.equal(first[0], other[0]) for other in others)


def draws_from_the_global_generator(step, batch_size, block_size, seed=0):
    starts = torch.randint(0, 900_000 - block_size, (batch_size, 1))
    x = load_corpus().train[starts + torch.arange(block_size)].long()
    return x, x


def ignores_the_step(step, batch_size, block_size, seed=0):
    return load_corpus().batch(0, batch_size, block_size, seed)


def adds_seed_and_step(step, batch_size, block_size, seed=0):
    return load_corpus().batch(seed + step, batch_size, block_size)


IMPURE = draws_from_the_global_generator, ignores_the_step, adds_seed_and_step


@pytest.mark.parametrize("batch", [load_corpus().batch, *IMPURE])
def test_batch_is_a_pure_function_of_its_arguments_and_others_are_caught(batch):
    assert is_a_pure_function(batch) == (batch not in IMPURE)


@given(
    step=st.integers(0, 2**40),
    seed=st.integers(0, 2**40),
    rows=st.integers(1, 20),
    block=st.integers(1, 29),
    part=st.sampled_from(["train", "validation"]),
)
@settings(deadline=None)
def test_targets_are_the_next_characters_of_the_same_part(
    step, seed, rows, block, part
):
    x, y = COUNTING.batch(step, rows, block, seed, part)
    assert x.shape == y.shape == (rows, block)
    assert x.dtype == y.dtype == torch.int64
    assert x.is_contiguous()
    assert y.is_contiguous()
    assert torch.equal(x + 1, y)  # in a text that counts, the next one is one more
    assert torch.equal(x[:, :1] + torch.arange(block), x)
    low, high = (0, 59) if part == "train" else (60, 89)
    assert low <= x.min()
    assert y.max() <= high


def test_every_place_of_the_text_can_be_drawn():
    drawn = {int(n) for step in range(99) for n in COUNTING.batch(step, 8, 2)[0][:, 0]}
    assert drawn == set(range(58))  # from 58, y would need token 60: validation


test_impossible_batches_are_refused = refused(
    (lambda: COUNTING.batch(-1, 8, 16), "step is -1; it must be at least 0"),
    (lambda: COUNTING.batch(0, 0, 16), "batch_size is 0; it must be at least 1"),
    (lambda: COUNTING.batch(0, 8, 0), "block_size is 0"),
    (lambda: COUNTING.batch(0, 8, 16, -1), "seed is -1"),
    (lambda: COUNTING.batch(0, 8, 60), "60; it must be below 60, the length of the tr"),
    (lambda: COUNTING.batch(0, 8, 16, 0, "x"), "'x'; it can be 'train' or 'validation"),
)


# Shards


def shares_out(shard):
    """The shards, in rank order, are the batch: contiguous, equal, each row once."""
    for n in (1, 2, 3, 4, 6):
        for columns in ((), (5,)):
            batch = torch.arange(12 * (5 if columns else 1)).reshape(12, *columns)
            shards = [shard(batch, rank, n) for rank in range(n)]
            if any(len(mine) != 12 // n for mine in shards):
                return False
            if not torch.equal(torch.cat(shards), batch):
                return False
    return True


def cut(step: int, more: int):
    """Return a shard function whose cuts are a row off, in place or in length."""

    def wrong(batch, rank, n):
        first = rank * (len(batch) // n + step)
        return batch[first:][: max(1, len(batch) // n + more)]

    return wrong


WRONG_SHARDS = {
    "everything to everyone": lambda batch, rank, n: batch,
    "rank 0's": lambda batch, rank, n: batch[: len(batch) // n],
    "every n-th row": lambda batch, rank, n: batch[rank::n],
    "one row too many": cut(0, 1),
    "overlap": cut(-1, 0),
    "drops a row": cut(0, -1),
}


@pytest.mark.parametrize("way", [shard, *WRONG_SHARDS.values()])
def test_shards_are_the_batch_and_wrong_ones_are_caught(way):
    assert shares_out(way) == (way is shard)


ROWS = torch.empty(12, 5)
test_what_cannot_be_a_shard_is_refused = refused(
    (lambda: shard(ROWS, 4, 4), "rank is 4 and world_size is 4"),
    (lambda: shard(ROWS, -1, 4), "rank is -1 and world_size is 4"),
    (lambda: shard(ROWS, 0, 0), "rank is 0 and world_size is 0"),
    (lambda: shard(ROWS, 0, -2), "rank is 0 and world_size is -2"),
    (lambda: shard(ROWS, 0, 5), "12 rows .* by 5 ranks; make .* a multiple of 5"),
    (lambda: shard(ROWS[:0], 0, 2), "0 rows cannot be shared equally by 2 ranks"),
)
