"""The one corpus of the whole course: the source files of Python's standard library.

Every machine that runs this course has them, so nothing is downloaded. The model reads
them character by character. The vocabulary has 96 symbols: newline and the 95 printable
ASCII characters. Any other character, a tab included, becomes "?": one character is
always one token. Another version of Python has slightly different source files, so
losses differ a little from one version to the next.
"""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

VOCABULARY = "\n" + "".join(chr(code) for code in range(32, 127))
MIN_CHARS, MAX_CHARS = 10_000, 1_000_000

# For bytes.translate: from ASCII code to token, and back.
_TO_TOKEN = bytes(
    VOCABULARY.index(chr(code) if chr(code) in VOCABULARY else "?")
    for code in range(256)
)
_TO_CODE = VOCABULARY.encode("ascii").ljust(256, b"?")


class CorpusError(RuntimeError):
    """An error: the source files are missing or too short; the message has a remedy."""


def encode(text: str) -> Tensor:
    """Return one token per character of `text`: (len(text),) int64, each 0 to 95."""
    tokens = text.encode("ascii", errors="replace").translate(_TO_TOKEN)
    return torch.from_numpy(np.frombuffer(tokens, np.uint8).astype(np.int64))


def decode(tokens: Tensor) -> str:
    """Return the characters of integer `tokens` (any shape, read row by row).

    `decode(encode(text))` is `text` with a "?" for every character outside VOCABULARY.
    Raises ValueError or TypeError for a token that is not a whole number, 0 to 95.
    """
    flat = tokens.detach().cpu().flatten()
    if flat.is_floating_point():
        raise TypeError(f"tokens is {flat.dtype}; it must be of an integer type")
    wrong = flat[(flat < 0) | (flat > 95)]
    if len(wrong):
        raise ValueError(f"tokens holds {int(wrong[0])}; tokens are 0 to 95")
    return bytes(flat.to(torch.uint8).numpy()).translate(_TO_CODE).decode("ascii")


@dataclass(frozen=True, eq=False)
class Corpus:
    """A text as tokens; its last part is kept for validation.

    `tokens` is (number of characters,) uint8, the smallest type that holds a token.
    """

    tokens: Tensor = field(repr=False)
    train_size: int

    @property
    def text(self) -> str:
        """The text, as the model sees it."""
        return decode(self.tokens)

    @property
    def train(self) -> Tensor:
        """The tokens to train on: (train_size,) uint8, a view."""
        return self.tokens[: self.train_size]

    @property
    def validation(self) -> Tensor:
        """The tokens that training never sees: a view of the rest."""
        return self.tokens[self.train_size :]

    def batch(
        self,
        step: int,
        batch_size: int,
        block_size: int,
        seed: int = 0,
        part: str = "train",
    ) -> tuple[Tensor, Tensor]:
        """Return (x, y), each (batch_size, block_size) int64: y is x one token later.

        Rows start at random places of the "train" or the "validation" part. The result
        depends on the arguments alone: it is the same on every rank and in every run.
        Raises ValueError, which says what is allowed, for an argument out of range.
        """
        for name, value, least in (
            ("step", step, 0),
            ("batch_size", batch_size, 1),
            ("block_size", block_size, 1),
            ("seed", seed, 0),
        ):
            if value < least:
                raise ValueError(f"{name} is {value}; it must be at least {least}")
        if part not in ("train", "validation"):
            raise ValueError(f"part is {part!r}; it can be 'train' or 'validation'")
        tokens = self.train if part == "train" else self.validation
        if block_size >= len(tokens):
            raise ValueError(
                f"block_size is {block_size}; it must be below {len(tokens)}, the "
                f"length of the {part} part"
            )
        random = np.random.default_rng([seed, step])
        starts = random.integers(len(tokens) - block_size, size=(batch_size, 1))
        places = torch.from_numpy(starts + np.arange(block_size))  # (B, T)
        return tokens[places].long(), tokens[places + 1].long()


def shard(batch: Tensor, rank: int, world_size: int) -> Tensor:
    """Return this rank's rows of `batch`: a view of 1/world_size of dim 0, in order.

    Rank 0 has the first rows; the shards of all ranks, one after another, are the
    batch. Raises ValueError if the rows cannot be divided equally, or if `rank` is not
    0 to world_size - 1.
    """
    if not 0 <= rank < world_size:
        raise ValueError(
            f"rank is {rank} and world_size is {world_size}; rank must be from 0 to "
            f"world_size - 1"
        )
    rows, left_over = divmod(len(batch), world_size)
    if left_over or rows == 0:
        raise ValueError(
            f"{len(batch)} rows cannot be shared equally by {world_size} ranks; "
            f"make the batch size a multiple of {world_size}"
        )
    return batch[rank * rows : (rank + 1) * rows]


@lru_cache(maxsize=4)
def load_corpus(folder: str | Path | None = None) -> Corpus:
    """Return the first MAX_CHARS characters of the `*.py` files in `folder`.

    `folder=None` is the standard library of the running Python. The files are taken in
    the order of their names, subfolders are not entered, and the last tenth of the
    characters becomes the validation part. The result is cached. Raises CorpusError if
    fewer than MIN_CHARS characters are found.
    """
    where = Path(sysconfig.get_path("stdlib") if folder is None else folder)
    pieces, size = [], 0
    for path in sorted(where.glob("*.py")):
        if path.name.startswith("_sysconfigdata"):  # generated when Python was built
            continue
        pieces.append(path.read_text(encoding="utf-8", errors="replace"))
        size += len(pieces[-1])
        if size >= MAX_CHARS:
            break
    if size < MIN_CHARS:
        raise CorpusError(_what_to_do(where, len(pieces), size))
    tokens = encode("".join(pieces)[:MAX_CHARS]).to(torch.uint8)
    return Corpus(tokens, round(0.9 * len(tokens)))


def _what_to_do(where: Path, files: int, size: int) -> str:
    found = f"{files} *.py files, {size:,} characters" if where.is_dir() else "nothing"
    return (
        f"The course reads the source files of Python's standard library, at least "
        f"{MIN_CHARS:,} characters. Found in {where}: {found}. Some small Pythons come "
        f"without their sources (minimal or zipped): use a full Python, or call "
        f"load_corpus(folder=...) with any folder of *.py files, for example an "
        f"installed package."
    )
