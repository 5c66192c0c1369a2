"""What can be asked of a training: every name, choice, default and check, once.

    layout = layout_for(8, tp=2, pp=2, zero=1)     # the other ranks go to dp: 2
    layout.check(batch_size=16)                    # SpecError says what is allowed

Plain data, without PyTorch: `ddp-course train` derives its options from the fields of
`Training` and `Layout`; `parallelize` carries a Layout out; the formulas, drawings and
benches take the names of schedules from here. Chapters 04 and 07 to 12.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from math import prod
from typing import Any, NamedTuple

from ddp_course.coordinates import Mesh


class SpecError(ValueError):
    """Something that cannot be asked for; `options` are the fields that say it."""

    def __init__(self, text: str, *options: str) -> None:
        super().__init__(text)
        self.options = options


# ---- choices: name -> what it is -----------------------------------------------------

DATA_PARALLEL = {
    "average": "one all-reduce per parameter, by the training loop, after backward",
    "naive": "one all-reduce per parameter, when backward has ended",
    "flat": "one all-reduce for all parameters, when backward has ended",
    "ddp": "all-reduces of buckets, while backward runs",
    "pytorch": "PyTorch's DistributedDataParallel",
}
ZERO = {
    0: "every rank keeps all of its model",
    1: "optimizer states are sharded",
    2: "and gradients",
    3: "and parameters: fully sharded data parallelism",
}


class ScheduleName(NamedTuple):
    """What a reader calls a pipeline schedule, and its default stages per rank."""

    title: str
    stages_per_rank: int = 1
    any_stages: bool = False  # whether a rank may have another number of stages


SCHEDULES = {
    "naive": ScheduleName("Naive"),
    "gpipe": ScheduleName("GPipe"),
    "1f1b": ScheduleName("1F1B"),
    "interleaved": ScheduleName("Interleaved 1F1B", 2, any_stages=True),
    "zero_bubble": ScheduleName("Zero bubble (ZB-H1)", any_stages=True),
}
PRECISIONS = {
    "fp32": "all in float32",
    "bf16": "float32, and products by autocast; ZeRO-3 gathers in 16 bits",
    "fp16": "the same bytes",
    "bf16-pure": "all in bfloat16, no copy",
}
COMPRESSORS = {  # name -> the type of its amount, as in topk:0.01
    "fp16": None,
    "bf16": None,
    "int8": None,
    "sign": None,
    "topk": float,
    "randomk": float,
    "powersgd": int,
}
COMPRESS = "fp16, bf16, int8, sign, topk:0.01, randomk:0.01 or powersgd:4"
OUTER = {
    "average": "take the mean of the ranks' parameters",
    "nesterov": "make an outer step towards it (DiLoCo)",
}
PRESETS = ("1m", "8m")
# `ddp-course plan` also knows models and precisions that are never trained here.
MODELS = (*PRESETS, "gpt2", "gpt2-xl", "gpt3-175b")
OPTIMIZERS = ("adamw", "adam", "sgd", "sgd-momentum")
PLANNED = PRECISIONS | {
    "fsdp-bf16": "float32 shards, gathered and reduced in bfloat16 (FSDP2)",
    "mixed": "half, and the optimizer has a float32 copy (the ZeRO paper)",
    "mixed-fp32-gradients": "as mixed, gradients added up in float32 (Megatron-LM)",
    "mixed-both-gradients": "as mixed, and a float32 copy of them (Megatron-LM, fp16)",
}
RECOMPUTE = ("none", "selective", "full")


# ---- what can be asked for -----------------------------------------------------------


def asked(default: Any, about: str, choices: Any = None, **limits: float) -> Any:
    """Return a field that is an option of the command line, too.

    `about` is its help text. `limits` of a number are `least`, or `above`, which it
    must exceed, and `below`; without any it must be a whole number from 1 on.
    """
    metadata = {"about": about, "choices": choices, "limits": limits or {"least": 1}}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Training:
    """What is trained, and for how long."""

    steps: int = asked(20, "steps of AdamW", least=0)
    batch_size: int = asked(8, "rows of a step, shared by all ranks")
    preset: str = asked("1m", "model", PRESETS)
    lr: float = asked(3e-4, "learning rate", above=0)
    seed: int = asked(0, "of the weights and the batches", least=0)
    clip: float | None = asked(None, "the largest norm of a step's gradient", above=0)
    checkpoint: str | None = asked(
        None, "save there, and go on from the newest checkpoint in it"
    )
    every: int = asked(10, "steps between two checkpoints")


@dataclass(frozen=True)
class Layout:
    """How the ranks share a training; `layout_for` fills in `dp`.

    Along tp ranks have other parts of every matrix, along pp other layers, along dp
    other rows of the batch. `zero` says what the ranks of dp shard; without it, they
    average whole gradients, by the class that `data_parallel` names.
    """

    dp: int = asked(1, "ranks with other rows of the batch; all that are left")
    pp: int = asked(1, "ranks with other layers")
    tp: int = asked(1, "ranks with other parts of every matrix")
    zero: int = asked(0, "ZeRO's stage: what the ranks of dp shard", ZERO)
    shard: int | None = asked(None, "with zero 3: ranks of dp that share one copy; all")
    data_parallel: str = asked(
        "ddp", "with zero 0: how gradients are averaged along dp", DATA_PARALLEL
    )
    threads: int = asked(1, "replicas as threads of one process: DataParallel")
    schedule: str = asked("1f1b", "the order of work in a pipeline", SCHEDULES)
    microbatches: int = asked(4, "parts in which a pipeline takes its rows")
    precision: str = asked("fp32", "see below", PRECISIONS)
    compress: str | None = asked(None, f"gradients travel in fewer bytes: {COMPRESS}")
    local_steps: int | None = asked(None, "steps alone, then the parameters' mean")
    outer: str | None = asked(None, "what is done with this mean; average", OUTER)
    outer_lr: float | None = asked(None, "of the outer optimizer; 0.7", least=0)
    outer_momentum: float | None = asked(None, "of it, too; 0.9", least=0, below=1)

    @property
    def mesh(self) -> Mesh:
        """The axes with more than one rank; hybrid shards divide dp into two axes."""
        sizes = {"dp": self.dp, "pp": self.pp, "tp": self.tp}  # tp talks most: last
        if self.shard not in (None, self.dp):
            replicate = self.dp // self.shard
            sizes = {"replicate": replicate, "shard": self.shard} | sizes
            del sizes["dp"]
        hybrid = ("replicate", "shard")
        kept = {a: n for a, n in sizes.items() if n > 1 or a in hybrid}
        return Mesh(kept or {"dp": 1})

    @property
    def local(self) -> Mapping[str, Any] | None:
        """The arguments of LocalSGD, or with an lr those of DiLoCo; or None."""
        if self.local_steps is None:
            return None
        outer = {"lr": self.outer_lr, "momentum": self.outer_momentum}
        outer = {name: value for name, value in outer.items() if value is not None}
        if self.outer == "nesterov":
            outer = {"lr": 0.7, "momentum": 0.9} | outer  # those of the paper
        return {"every": self.local_steps, **outer}

    @property
    def stages(self) -> int:
        """The number of the pipeline's stages."""
        return self.pp * SCHEDULES[self.schedule].stages_per_rank

    def share(self, rank: int) -> tuple[int, int]:
        """Return which part of the rows `rank` has, and of how many parts."""
        return rank // (self.pp * self.tp), self.dp

    def check(self, world_size: int | None = None, batch_size: int | None = None,
              layers: int | None = None) -> None:  # fmt: skip
        """Raise SpecError, saying what is allowed, unless all of this can be together.

        With `world_size`, also unless so many ranks make this layout; with
        `batch_size`, unless its rows can be shared; with `layers`, of the model with
        its embedding and head, unless there is one for each stage.
        """
        check_fields(self)
        for problem in (
            _threads, _beside_zero, _beside_data_parallel, _bubble, _local, _compress
        ):  # fmt: skip
            if text := problem(self):
                raise SpecError(text, problem.__name__.strip("_"))
        if world_size is not None:
            self.mesh.check(world_size)
        if batch_size is not None:
            self._check_rows(batch_size)
        if layers is not None and self.pp > 1 and self.stages > layers:
            raise SpecError(
                f"schedule {self.schedule!r} on {self.pp} ranks has {self.stages} "
                f"stages, and the model has {layers} layers, embedding and head among "
                "them; take fewer ranks, another schedule, or a model with more layers",
                "pp",
            )

    def _check_rows(self, batch_size: int) -> None:
        parts = self.threads if self.threads > 1 else self.dp
        alone = self.threads == self.pp == self.tp == 1
        who = f"{parts} {'rank' if alone else 'replica'}{'s' * (parts > 1)}"
        if batch_size < 1 or batch_size % parts:
            raise SpecError(
                f"{batch_size} rows cannot be shared equally by {who}; make the batch "
                f"size a multiple of {parts}",
                "batch_size",
            )
        if self.pp > 1 and batch_size // parts < self.microbatches:
            raise SpecError(
                f"{batch_size // parts} rows cannot be cut into {self.microbatches} "
                f"microbatches; make the batch size {parts * self.microbatches} or "
                "more",
                "batch_size",
                "microbatches",
            )


def layout_for(world_size: int, **options: Any) -> Layout:
    """Return the layout of `world_size` ranks, checked; pure.

    `options` are fields of Layout. If dp is not among them, the ranks that tp and pp
    leave go to it. Raises SpecError, a ValueError. Chapter 09.
    """
    known = [each.name for each in fields(Layout)]
    if unknown := min(options.keys() - set(known), default=None):
        text = f"there is no option {unknown!r}; there are {', '.join(known)}"
        raise SpecError(successor(unknown, options[unknown]) or text, unknown)
    options = {name: value for name, value in options.items() if value is not None}
    if "dp" not in options:
        check_fields(Layout(**options))
        others = prod(options.get(axis, 1) for axis in ("tp", "pp"))
        options["dp"] = max(1, world_size // others)
    layout = Layout(**options)
    layout.check(world_size)
    return layout


def check_fields(spec: Training | Layout) -> None:
    """Raise SpecError for a field whose value is none of its choices, or too small."""
    for each in fields(spec):
        value, about = getattr(spec, each.name), each.metadata
        if value is None and each.default is None:
            continue
        if about["choices"] is not None:
            right = value in about["choices"] and not isinstance(value, bool)
            can = "can be one of " + ", ".join(map(str, about["choices"]))
        elif str(each.type).startswith("str"):
            continue
        else:
            whole, limits = str(each.type).startswith("int"), about["limits"]
            right = type(value) is int if whole else isinstance(value, int | float)
            right = right and within(value, **limits)
            can = "must be " + in_words(**limits)
        if not right:
            raise SpecError(f"{each.name} is {value!r}; it {can}", each.name)


def within(
    value: float,
    least: float = -math.inf,
    above: float = -math.inf,
    below: float = math.inf,
) -> bool:
    """Tell whether a number keeps the limits of its field."""
    return least <= value < below and value > above


def in_words(**limits: float) -> str:
    """Say which numbers keep these limits: "1 or more", "above 0"."""
    words = {"least": "{} or more", "above": "above {}", "below": "below {}"}
    return " and ".join(words[name].format(limit) for name, limit in limits.items())


# ---- what cannot be together: each returns a sentence, or None -----------------------


def _threads(a: Layout) -> str | None:
    ranks = a.dp * a.pp * a.tp
    if a.threads > 1 and (ranks > 1 or a.zero):
        return (
            f"threads is {a.threads}: DataParallel is one process, and here are "
            f"{ranks} ranks, zero {a.zero}; start one rank, or leave threads out"
        )
    return None


def _beside_zero(a: Layout) -> str | None:
    if a.zero and a.data_parallel != "ddp":
        return (
            f"data_parallel is {a.data_parallel!r} and zero is {a.zero}: ZeRO averages "
            "gradients itself; give one of the two"
        )
    if a.zero == 3 and a.pp > 1:
        return (
            f"zero is 3 and pp is {a.pp}: every unit would be gathered once for each "
            "microbatch; take zero 1"
        )
    if a.shard is not None and (a.zero != 3 or a.dp % a.shard):
        return (
            f"shard is {a.shard}, zero is {a.zero} and dp is {a.dp}; shard must be a "
            "divisor of dp, and is for zero 3"
        )
    return None


def _beside_data_parallel(a: Layout) -> str | None:
    why = {
        "average": "the training loop averages over all ranks",
        "pytorch": "it is there to be compared with",
    } | (dict.fromkeys(("naive", "flat"), "it would average once for each microbatch"))
    wrong = ["pp"] * (a.pp > 1) + ["tp"] * (a.tp > 1)
    if a.data_parallel in ("naive", "flat"):
        wrong = wrong[: int(a.pp > 1)]
    if a.data_parallel != "ddp" and wrong:
        return (
            f"data_parallel {a.data_parallel!r} cannot be beside {' and '.join(wrong)}:"
            f" {why[a.data_parallel]}; take 'ddp'"
        )
    return None


def _bubble(a: Layout) -> str | None:
    if a.precision in ("bf16", "fp16") and a.schedule == "zero_bubble" and a.pp > 1:
        return (
            f"precision {a.precision!r} cannot be with schedule 'zero_bubble', whose "
            "backward in two halves takes weights as they are; take bf16-pure, or 1f1b"
        )
    return None


def _local(a: Layout) -> str | None:
    outer = {"outer_lr": a.outer_lr, "outer_momentum": a.outer_momentum}
    given = [name for name, value in outer.items() if value is not None]
    if a.local_steps is None:
        if a.outer or given:
            return "an outer optimizer is of no use without local_steps"
        return None
    if given and a.outer != "nesterov":
        return f"{given[0]} is of no use without outer 'nesterov'"
    if not _whole_replicas(a) or a.compress:
        return (
            f"local_steps is {a.local_steps}; ranks that step alone have whole models "
            "and send no gradients: take data_parallel 'ddp' along dp alone, with zero "
            "0 and without compress"
        )
    return None


def _compress(a: Layout) -> str | None:
    if a.compress is None:
        return None
    name, colon, amount = a.compress.partition(":")
    read = COMPRESSORS.get(name)
    try:
        right = name in COMPRESSORS and (read(amount) or True if read else not colon)
    except ValueError:
        right = False
    if not right:
        return f"compress is {a.compress!r}; it can be {COMPRESS}"
    if not _whole_replicas(a):
        return (
            f"compress is {a.compress!r}, zero is {a.zero}, data_parallel is "
            f"{a.data_parallel!r} and the mesh {a.mesh}; compressing is for "
            "data_parallel 'ddp' along dp alone, with zero 0"
        )
    if a.dp == 1:
        text = f"compress is {a.compress!r}, and one rank sends nothing"
        return f"{text}; take two ranks or more"
    if a.precision == "fp16":
        return (
            f"compress {a.compress!r} cannot be with precision 'fp16': what is left "
            "out of a scaled gradient would be added to one of another scale; take "
            "bf16"
        )
    return None


def _whole_replicas(a: Layout) -> bool:
    return a.data_parallel == "ddp" and a.threads == a.pp == a.tp == 1 and not a.zero


# ---- names of earlier versions -------------------------------------------------------


def successor(option: str, value: Any = None) -> str | None:
    """Return the sentence that answers an option of earlier versions, or None."""
    if option == "replicas":
        return "replicas is called threads now: --threads 4, train(threads=4)"
    if option != "strategy":
        return None
    axis = "the number of ranks along it"
    now = {f"zero{n}": f"is --zero {n} now, train(zero={n})" for n in (1, 2, 3)}
    now |= {n: f"is --{n} N now, train({n}=N), with {axis}" for n in ("tp", "pp")}
    now |= {n: f"is --data-parallel {n} now" for n in DATA_PARALLEL if n != "ddp"}
    now["dp"] = "is --threads N now, train(threads=N)"
    now["ddp"] = "is the default: leave it out"
    other = "does not exist; see --data-parallel, --zero, --tp, --pp and --threads"
    return f"strategy {value!r} {now.get(value, other)}"
