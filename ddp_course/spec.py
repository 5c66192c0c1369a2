"""The options of a training run: every name, choice, default and check in one file.

    layout = layout_for(8, tp=2, pp=2, zero=1)     # the other ranks go to dp: 2
    layout.check(batch_size=16)                    # SpecError says what is allowed

Plain data, without PyTorch, so that a mistake is reported at once. `ddp-course train`
derives its options from the fields of `Training` and `Layout`; `parallelize` asks a
Layout which folders to load; formulas, drawings and benches take the names of schedules
from here. Chapters 04 and 07 to 12.

A new axis is an entry in AXES and a field of Layout; a new schedule is an entry in
SCHEDULES. CONTRIBUTING.md lists the other files.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from math import prod
from numbers import Integral
from typing import Any, NamedTuple

from ddp_course.coordinates import Mesh
from ddp_course.gpt_config import PRESETS, GPTConfig, MixtureConfig


class SpecError(ValueError):
    """An error: wrong or incompatible options; `options` names their fields."""

    def __init__(self, text: str, *options: str) -> None:
        super().__init__(text)
        self.options = options


# ---- choices: name -> description ----------------------------------------------------


class Axis(NamedTuple):
    """An axis of the mesh.

    Attributes:
        about: the help text of its option.
        room: the folder whose `axis.py` makes a model parallel along this axis; None
            for dp, where other fields of the layout choose the folder.
        divides: the fields of GPTConfig that must be multiples of its number of ranks.
        averaged: whether its ranks have different data, so that gradients must be
            averaged along this axis, too.
        rows: whether these different data are different rows of the batch.
    """

    about: str
    room: str | None
    divides: tuple[str, ...] = ()
    averaged: bool = False
    rows: bool = False


# In the order of the mesh: the axis that communicates most comes last, so its ranks are
# neighbours. Axes with other rows come first: see `Layout.share`. `parallelize` applies
# the axes in the opposite order.
AXES = {
    "dp": Axis(
        "data parallel: ranks with different rows of the batch",
        None,
        averaged=True,
        rows=True,
    ),
    "ep": Axis(
        "expert parallel: ranks of dp with different experts",
        "experts",
        ("experts",),
        averaged=True,
    ),
    "pp": Axis("pipeline parallel: ranks with different layers", "pipeline"),
    "cp": Axis(
        "context parallel: ranks with different positions of a sequence",
        "context_parallel",
        averaged=True,
    ),
    "tp": Axis(
        "tensor parallel: ranks with different parts of the matrices",
        "tensor_parallel",
        ("n_head", "vocab_size"),
    ),
}
DATA_PARALLEL = {
    "average": "one all-reduce per parameter, by the training loop, after backward",
    "naive": "one all-reduce per parameter, when backward has ended",
    "flat": "one all-reduce for all parameters, when backward has ended",
    "ddp": "all-reduces of buckets, while backward runs",
    "pytorch": "PyTorch's DistributedDataParallel",
}
ATTENTION = {
    "ring": "keys and values go around",
    "gathered": "every rank gathers all keys and values",
    "ulysses": "every rank gets the whole sequence of some heads",
}
ZERO = {
    0: "nothing is sharded: each rank of dp keeps its whole model",
    1: "optimizer states are sharded",
    2: "optimizer states and gradients are sharded",
    3: "parameters, too: fully sharded data parallelism (FSDP)",
}


class ScheduleName(NamedTuple):
    """A description of a pipeline schedule.

    Attributes:
        title: its name in tables and drawings.
        stages_per_rank: the default number of stages on each rank.
        any_stages: whether a rank may have another number of stages.
        closed_form: whether `theory.pipeline` has formulas for it.
        halves: whether its backward runs in two halves, I and W.
    """

    title: str
    stages_per_rank: int = 1
    any_stages: bool = False
    closed_form: bool = False
    halves: bool = False


SCHEDULES = {
    "naive": ScheduleName("Naive", closed_form=True),
    "gpipe": ScheduleName("GPipe", closed_form=True),
    "1f1b": ScheduleName("1F1B", closed_form=True),
    "interleaved": ScheduleName("Interleaved 1F1B", 2, True, closed_form=True),
    "zero_bubble": ScheduleName("Zero bubble (ZB-H1)", 1, True, True, halves=True),
}


class PrecisionName(NamedTuple):
    """The description of a precision, and PyTorch's names of its two types.

    Attributes:
        parameters: the type of parameters, gradients and optimizer states.
        products: the type in which autocast computes products of matrices, if any.
    """

    about: str
    parameters: str = "float32"
    products: str | None = None


PRECISIONS = {
    "fp32": PrecisionName("everything in float32"),
    "bf16": PrecisionName(
        "autocast: float32 weights, products in bfloat16; ZeRO-3 gathers bfloat16",
        products="bfloat16",
    ),
    "fp16": PrecisionName(
        "autocast with float16, and loss scaling", products="float16"
    ),
    "bf16-pure": PrecisionName(
        "everything in bfloat16",
        parameters="bfloat16",
    ),
}


class Amount(NamedTuple):
    """A number after the colon of a compressor's name, as in topk:0.01.

    Attributes:
        name: its name in error messages.
        read: parses its text.
        example: a text that is valid.
        limits: arguments of `within`.
    """

    name: str
    read: Callable[[str], float]
    example: str
    limits: Mapping[str, float]


DENSITY = Amount("density", float, "0.01", {"above": 0, "most": 1})
COMPRESSORS: dict[str, Amount | None] = {
    "fp16": None,
    "bf16": None,
    "int8": None,
    "sign": None,
    "topk": DENSITY,
    "randomk": DENSITY,
    "powersgd": Amount("rank", int, "4", {"least": 1}),
}
OUTER = {
    "average": "every rank takes the mean of the ranks' parameters",
    "nesterov": "a step of Nesterov's momentum towards this mean (DiLoCo)",
}
# `ddp-course plan` also knows models and precisions that are never trained here.
MODELS = (*PRESETS, "gpt2", "gpt2-xl", "gpt3-175b")
OPTIMIZERS = ("adamw", "adam", "sgd", "sgd-momentum")
PLANNED = {name: each.about for name, each in PRECISIONS.items()} | {
    "fsdp-bf16": "float32 shards, gathered and reduced in bfloat16 (FSDP2)",
    "mixed": "16-bit weights; the optimizer keeps a float32 copy (ZeRO paper)",
    "mixed-fp32-gradients": "mixed, gradients added up in float32 (Megatron-LM)",
    "mixed-both-gradients": "mixed, gradients in 16 bits and float32 (Megatron-LM)",
}
RECOMPUTE = ("none", "selective", "full")
SAVES = {
    "waiting": "training waits until a checkpoint is on the disk",
    "async": "a thread writes a copy while training goes on",
}


def compressor_words() -> str:
    """Return all compressors as a reader types them, with an example of each amount."""
    words = [n if a is None else f"{n}:{a.example}" for n, a in COMPRESSORS.items()]
    return f"{', '.join(words[:-1])} or {words[-1]}"


# ---- the options ---------------------------------------------------------------------


def option(default: Any, about: str, choices: Any = None, **limits: float) -> Any:
    """Return a dataclass field that is also an option of the command line.

    `about` is its help text. `limits` of a number are arguments of `within`; without
    any, it must be a whole number of 1 or more.
    """
    metadata = {"about": about, "choices": choices, "limits": limits or {"least": 1}}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Training:
    """The options of a training run that do not depend on the number of ranks."""

    steps: int = option(20, "optimizer steps (AdamW)", least=0)
    batch_size: int = option(8, "rows of one step's batch, divided among the ranks")
    preset: str = option("1m", "size of the GPT, in parameters", PRESETS)
    lr: float = option(3e-4, "learning rate", above=0)
    seed: int = option(0, "seed of the initial weights and the batches", least=0)
    experts: int | None = option(
        None, "MLPs in each block, of which each token uses a few", least=2
    )
    experts_per_token: int = option(2, "with --experts: MLPs that a token uses")
    capacity: float | None = option(
        None,
        "with --experts: most tokens of a sequence that an expert takes, as a multiple "
        "of the mean; the rest are dropped (default: no limit)",
        above=0,
    )
    balance: float = option(0.01, "with --experts: balance loss's weight", least=0)
    clip: float | None = option(None, "clip each step's gradient to this norm", above=0)
    checkpoint: str | None = option(
        None, "save checkpoints in this folder; resume from the newest one in it"
    )
    every: int = option(10, "steps between two checkpoints")
    save: str = option(
        "waiting", "; ".join(f"{n}: {how}" for n, how in SAVES.items()), SAVES
    )

    @property
    def config(self) -> GPTConfig:
        """The sizes of the model; raises ValueError if no model can have them."""
        return self.with_experts(PRESETS[self.preset])

    def with_experts(self, config: GPTConfig) -> GPTConfig:
        """Return `config`, with experts if the options ask for experts."""
        names = ("experts", "experts_per_token", "capacity", "balance")
        if self.experts is None:
            for name in names:
                if getattr(self, name) != getattr(Training, name):
                    raise SpecError(f"{name} has no effect without experts", name)
            return config
        return MixtureConfig(
            **{each.name: getattr(config, each.name) for each in fields(GPTConfig)},
            **{name: getattr(self, name) for name in names},
        )


@dataclass(frozen=True)
class Layout:
    """The options that say how ranks share a training run; `layout_for` sets `dp`.

    `zero` says what the ranks of dp shard. With zero 0 they average whole gradients,
    with the class that `data_parallel` names.
    """

    dp: int = option(1, AXES["dp"].about)
    ep: int = option(1, AXES["ep"].about)
    pp: int = option(1, AXES["pp"].about)
    cp: int = option(1, AXES["cp"].about)
    tp: int = option(1, AXES["tp"].about)
    zero: int = option(0, "ZeRO stage: what the ranks of dp shard; see below", ZERO)
    shard: int | None = option(
        None,
        "with --zero 3: ranks of dp that share one model (default: all)",
    )
    data_parallel: str = option(
        "ddp",
        "with --zero 0: how gradients are averaged; see below",
        DATA_PARALLEL,
    )
    threads: int = option(1, "replicas in threads of one process (DataParallel)")
    schedule: str = option("1f1b", "with --pp: its schedule", SCHEDULES)
    microbatches: int = option(4, "with --pp: parts into which the batch is cut")
    attention: str = option(
        "ring", "with --cp: how ranks get all keys; see below", ATTENTION
    )
    precision: str = option("fp32", "number formats; see below", PRECISIONS)
    compress: str | None = option(
        None, f"compress gradients before sending them: {compressor_words()}"
    )
    local_steps: int | None = option(
        None, "average parameters every N steps, not gradients"
    )
    outer: str | None = option(
        None, "with --local-steps: see below (default: average)", OUTER
    )
    outer_lr: float | None = option(
        None, "learning rate of nesterov (default: 0.7)", above=0
    )
    outer_momentum: float | None = option(
        None, "momentum of nesterov (default: 0.9)", least=0, below=1
    )

    @property
    def sizes(self) -> dict[str, int]:
        """The number of ranks along each of AXES; those of ep are among those of dp."""
        return {axis: getattr(self, axis) for axis in AXES}

    @property
    def ranks(self) -> int:
        """The number of ranks of the whole layout."""
        return prod(self.sizes.values()) // self.ep

    @property
    def model_axes(self) -> list[str]:
        """The axes other than dp with more than one rank."""
        return [axis for axis, n in self.sizes.items() if axis != "dp" and n > 1]

    @property
    def mesh(self) -> Mesh:
        """The axes with more than one rank; hybrid sharding divides dp into two axes.

        Experts divide dp, too: ranks along edp have the same experts, ranks along ep
        have different ones.
        """
        sizes = self.sizes
        hybrid = {}
        if sizes.pop("ep") > 1:
            divided = {"edp": self.dp // self.ep, "ep": self.ep}
            del sizes["dp"]
            return Mesh(divided | {a: n for a, n in sizes.items() if n > 1})
        if self.shard not in (None, self.dp):
            hybrid = {"replicate": self.dp // self.shard, "shard": self.shard}
            del sizes["dp"]
        return Mesh(hybrid | {a: n for a, n in sizes.items() if n > 1} or {"dp": 1})

    @property
    def averaged(self) -> tuple[str, ...]:
        """The axes of the mesh along which gradients are averaged, in one group."""
        dp = ("dp", "replicate", "shard", "edp")
        axes = self.mesh.axes
        return tuple(a for a in axes if a in dp or AXES[a].averaged)

    @property
    def together(self) -> list[tuple[str, ...]]:
        """The tuples of axes that need one common group, for `make_groups`."""
        axes = self.averaged[1:] if "shard" in self.averaged else self.averaged
        groups = [axes, self.replicas] if self.ep > 1 else [axes]
        return [each for each in groups if len(each) > 1]

    @property
    def replicas(self) -> tuple[str, ...]:
        """The axes along which ranks with the same experts average their gradients."""
        return tuple(axis for axis in self.averaged if axis != "ep")

    @property
    def rooms(self) -> list[str]:
        """The folders whose `axis.py` makes a model parallel, in this order.

        Data parallelism comes last: it averages or shards the parameters that the other
        axes have left on each rank.
        """
        rooms = [AXES[axis].room for axis in reversed(self.model_axes)]
        if not self.averaged:
            return rooms
        data = "zero" if self.zero else "data_parallel"
        return [*rooms, data if self.local is None else "local_sgd"]

    @property
    def local(self) -> Mapping[str, Any] | None:
        """The arguments of LocalSGD, or, with an `lr`, of DiLoCo; None for neither."""
        if self.local_steps is None:
            return None
        outer = {"lr": self.outer_lr, "momentum": self.outer_momentum}
        outer = {name: value for name, value in outer.items() if value is not None}
        if self.outer == "nesterov":
            outer = {"lr": 0.7, "momentum": 0.9} | outer  # the paper's defaults
        return {"every": self.local_steps, **outer}

    @property
    def stages(self) -> int:
        """The number of the pipeline's stages."""
        return self.pp * SCHEDULES[self.schedule].stages_per_rank

    @property
    def shares(self) -> int:
        """The number of shares into which the rows of a batch are divided."""
        return prod(n for axis, n in self.sizes.items() if AXES[axis].rows)

    def share(self, rank: int) -> tuple[int, int]:
        """Return which share of the rows `rank` has, and the number of shares."""
        return rank * self.shares // self.ranks, self.shares

    def check(
        self,
        world_size: int | None = None,
        batch_size: int | None = None,
        config: GPTConfig | None = None,
    ) -> None:
        """Raise SpecError, saying what is allowed, if options are incompatible.

        Also raises it if the layout needs another `world_size`, if the rows of
        `batch_size` cannot be shared equally, or if a GPT of the sizes in `config`
        cannot be divided among the ranks.
        """
        check_fields(self)
        for problem in (
            _threads, _experts, _beside_zero, _beside_data_parallel, _bubble, _local,
            _compress,
        ):  # fmt: skip
            if text := problem(self):
                raise SpecError(text, problem.__name__.strip("_"))
        if world_size is not None:
            try:
                self.mesh.check(world_size)
            except ValueError as error:
                raise SpecError(str(error), *self.model_axes, "dp") from None
        if batch_size is not None:
            self._check_rows(batch_size)
        if config is not None:
            self._check_sizes(config)

    def _check_rows(self, batch_size: int) -> None:
        parts = self.threads if self.threads > 1 else self.shares
        alone = self.threads == 1 and not self.model_axes
        who = f"{parts} {'rank' if alone else 'replica'}{'s' * (parts > 1)}"
        if not isinstance(batch_size, Integral) or batch_size < 1:
            text = f"batch_size is {batch_size!r}; it must be a whole number, 1 or more"
            raise SpecError(text, "batch_size")
        if batch_size % parts:
            raise SpecError(
                f"{batch_size} rows cannot be shared equally by {who}; make the "
                f"batch size a multiple of {parts}",
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

    def _check_sizes(self, config: GPTConfig) -> None:
        if not isinstance(config, GPTConfig):
            raise SpecError(f"config is {config!r}; it must be a GPTConfig", "preset")
        if isinstance(config, MixtureConfig):
            if text := _beside_experts(self, config):
                raise SpecError(text, "experts")
        elif self.ep > 1:
            text = f"ep is {self.ep}, and the model has no experts; set experts, to 8"
            raise SpecError(f"{text} for example, or leave ep out", "ep", "experts")
        for axis in self.model_axes:
            if text := config.indivisible(AXES[axis].divides, self.sizes[axis]):
                raise SpecError(text, axis)
        heads_of = self.cp * self.tp if self.attention == "ulysses" else 1
        if text := config.indivisible(("n_head",), heads_of):
            raise SpecError(text, "attention", "cp")
        layers = config.n_layer + 2
        if self.pp > 1 and self.stages > layers:
            raise SpecError(
                f"schedule {self.schedule!r} on {self.pp} ranks has {self.stages} "
                f"stages, and the model has {layers} layers, embedding and head among "
                "them; use fewer ranks, another schedule, or a model with more layers",
                "pp",
            )


def layout_for(world_size: int, **options: Any) -> Layout:
    """Return the layout of `world_size` ranks, checked.

    `options` are fields of Layout. If dp is not among them, it gets the ranks that the
    other axes leave. Raises SpecError, a ValueError. Chapter 09.
    """
    if not isinstance(world_size, Integral) or world_size < 1:
        can = "it must be a whole number, 1 or more"
        raise SpecError(f"world_size is {world_size!r}; {can}")
    check_names(options, [each.name for each in fields(Layout)])
    options = {name: value for name, value in options.items() if value is not None}
    if free := "dp" not in options:
        layout = Layout(**options)
        check_fields(layout)
        options["dp"] = max(1, world_size // layout.ranks)
    layout = Layout(**options)
    if free and world_size % (others := layout.ranks // layout.dp):
        layout.check()
        axes = {
            a: n for a, n in layout.sizes.items() if n > 1 and a not in ("dp", "ep")
        }
        raise SpecError(
            f"the number of ranks is {world_size}; it must be a multiple of {others}, "
            f"for {Mesh(axes)}"
        )
    layout.check(world_size)
    return layout


def check_names(options: Mapping[str, Any], known: Iterable[str]) -> None:
    """Raise SpecError for an option with a name that is not in `known`."""
    known = list(known)
    if unknown := min(options.keys() - set(known), default=None):
        text = f"there is no option {unknown!r}; the options are {', '.join(known)}"
        raise SpecError(successor(unknown, options[unknown]) or text, unknown)


def check_fields(spec: Training | Layout) -> None:
    """Raise SpecError for a field with a value outside its choices or limits."""
    for each in fields(spec):
        value, about = getattr(spec, each.name), each.metadata
        if value is None and each.default is None:
            continue
        if about["choices"] is not None:
            # a list: the value may not be hashable
            right = value in [*about["choices"]] and not isinstance(value, bool)
            can = "can be one of " + ", ".join(map(str, about["choices"]))
        elif str(each.type).startswith("str"):
            continue
        else:
            whole, limits = str(each.type).startswith("int"), about["limits"]
            real = isinstance(value, int | float) and not isinstance(value, bool)
            right = type(value) is int if whole else real
            right = right and within(value, **limits)
            words = in_words(**limits)
            between = " " if words.startswith("above") else ", "
            can = f"must be a {'whole ' if whole else ''}number{between}{words}"
        if not right:
            raise SpecError(f"{each.name} is {value!r}; it {can}", each.name)


def within(
    value: float,
    least: float = -math.inf,
    above: float = -math.inf,
    below: float = math.inf,
    most: float = math.inf,
) -> bool:
    """Return whether a number is within limits; `above` and `below` are exclusive."""
    return least <= value < below and above < value <= most


def in_words(**limits: float) -> str:
    """Return a description of these limits: "1 or more", "above 0"."""
    words = {
        "least": "{} or more",
        "above": "above {}",
        "below": "below {}",
        "most": "at most {}",
    }
    return " and ".join(words[name].format(limit) for name, limit in limits.items())


def compression(words: str) -> tuple[str, float | None]:
    """Return a compressor's name and amount, parsed from a text such as topk:0.01.

    Raises SpecError for an unknown name, or for an amount outside its limits.
    """
    name, colon, text = str(words).partition(":")
    unknown = f"compress is {words!r}; it can be {compressor_words()}"
    if name not in COMPRESSORS:
        raise SpecError(unknown, "compress")
    amount = COMPRESSORS[name]
    try:
        if amount is None:
            if colon:
                raise ValueError
            return name, None
        value = amount.read(text)
    except ValueError:
        raise SpecError(unknown, "compress") from None
    if not within(value, **amount.limits):
        can = in_words(**amount.limits)
        text = f"compress is {words!r}; its {amount.name} must be {can}"
        raise SpecError(text, "compress")
    return name, value


# ---- incompatible options: each function returns a sentence, or None -----------------


def _threads(a: Layout) -> str | None:
    ranks = a.ranks
    if a.threads > 1 and (ranks > 1 or a.zero):
        return (
            f"threads is {a.threads}, ranks is {ranks} and zero is {a.zero}: "
            "DataParallel runs in one process, without ZeRO; use ranks 1 and zero 0, "
            "or threads 1"
        )
    if a.threads > 1 and a.data_parallel != "ddp":
        return (
            f"threads is {a.threads} and data_parallel is {a.data_parallel!r}: "
            "DataParallel averages its threads' gradients itself; set only one of the "
            "two"
        )
    return None


def _experts(a: Layout) -> str | None:
    if a.ep == 1:
        return None
    if a.dp % a.ep:
        return (
            f"ep is {a.ep} and dp is {a.dp}; ep must be a divisor of dp, as the ranks "
            "that share experts are ranks of dp"
        )
    if a.zero == 3:
        return (
            f"zero is 3 and ep is {a.ep}: ranks with other experts cannot gather their "
            "parameters from each other; use zero 1 or 2"
        )
    if a.data_parallel != "ddp":
        return (
            f"data_parallel is {a.data_parallel!r} and ep is {a.ep}: experts are "
            "averaged among fewer ranks than the rest, which only 'ddp' does"
        )
    return None


def _beside_experts(a: Layout, config: MixtureConfig) -> str | None:
    if a.cp > 1 and (config.capacity is not None or config.balance):
        return (
            f"cp is {a.cp}, and ranks with a part of a sequence do not know its loads; "
            "leave capacity out and use balance 0"
        )
    if config.balance and (a.precision == "fp16" or a.threads > 1):
        return (
            f"precision is {a.precision!r} and threads is {a.threads}: the gradient of "
            "the balance loss is neither scaled with the loss nor averaged over "
            "threads; use balance 0, or bf16 and ranks"
        )
    return None


def _beside_zero(a: Layout) -> str | None:
    if a.zero and a.data_parallel != "ddp":
        return (
            f"data_parallel is {a.data_parallel!r} and zero is {a.zero}: ZeRO averages "
            "gradients itself; set only one of the two"
        )
    if a.zero == 3 and a.pp > 1:
        return (
            f"zero is 3 and pp is {a.pp}: every unit would be gathered once for each "
            "microbatch; use zero 1"
        )
    if a.shard is not None and a.zero != 3:
        return f"shard is {a.shard} and zero is {a.zero}; shard needs zero 3"
    if a.shard is not None and a.dp % a.shard:
        return f"shard is {a.shard} and dp is {a.dp}; shard must be a divisor of dp"
    return None


def _beside_data_parallel(a: Layout) -> str | None:
    why = {
        "average": "the training loop averages over all ranks",
        "pytorch": "PyTorch's class is offered for comparison along dp alone",
    } | (dict.fromkeys(("naive", "flat"), "it would average once for each microbatch"))
    wrong = a.model_axes
    if a.data_parallel in ("naive", "flat"):
        wrong = [axis for axis in wrong if axis == "pp"]
    if a.data_parallel != "ddp" and wrong:
        return (
            f"data_parallel {a.data_parallel!r} cannot be combined with "
            f"{' and '.join(wrong)}: {why[a.data_parallel]}; use 'ddp'"
        )
    return None


def _bubble(a: Layout) -> str | None:
    autocast = PRECISIONS[a.precision].products is not None
    if autocast and SCHEDULES[a.schedule].halves and a.pp > 1:
        return (
            f"precision {a.precision!r} cannot be combined with schedule "
            f"{a.schedule!r}: the two halves of its backward do not autocast the "
            "weights; use bf16-pure, or 1f1b"
        )
    return None


def _local(a: Layout) -> str | None:
    outer = {"outer_lr": a.outer_lr, "outer_momentum": a.outer_momentum}
    typed = [name for name, value in outer.items() if value is not None]
    if a.local_steps is None:
        if a.outer or typed:
            names = ", ".join(["outer"] * bool(a.outer) + typed)
            return f"{names} has no effect without local_steps; set local_steps, too"
        return None
    if typed and a.outer != "nesterov":
        return f"{typed[0]} has no effect without outer 'nesterov'; set that, too"
    wrong = _divided_replicas(a)
    if a.compress:
        wrong.append(f"compress is {a.compress!r}")
    if wrong:
        return (
            f"local_steps is {a.local_steps} and {wrong[0]}; ranks that "
            "step alone have whole models and send no gradients: use data_parallel "
            "'ddp' along dp alone, with zero 0 and without compress"
        )
    return None


def _compress(a: Layout) -> str | None:
    if a.compress is None:
        return None
    name, _ = compression(a.compress)
    if wrong := _divided_replicas(a):
        return (
            f"compress is {a.compress!r} and {wrong[0]}; compressing is for "
            "data_parallel 'ddp' along dp alone, with zero 0"
        )
    if a.dp == 1:
        text = f"compress is {a.compress!r}, and one rank sends nothing"
        return f"{text}; use two ranks or more"
    if a.precision == "fp16":
        return (
            f"compress {a.compress!r} cannot be combined with precision 'fp16': the "
            "compression error of one step's scaled gradient would be added to a "
            "gradient with another scale; use bf16"
        )
    if name == "powersgd" and PRECISIONS[a.precision].parameters != "float32":
        return (
            f"compress {a.compress!r} cannot be combined with precision "
            f"{a.precision!r}: its memory also adds up how far a rank's gradients are "
            "from the mean, until 16 bits have no room for the next gradient; use bf16"
        )
    return None


def _divided_replicas(a: Layout) -> list[str]:
    """Return which options are not those of whole replicas, averaged by our DDP."""
    wrong = [f"{axis} is {a.sizes[axis]}" for axis in a.model_axes]
    for name, alone in {"threads": 1, "zero": 0, "data_parallel": "ddp"}.items():
        if (value := getattr(a, name)) != alone:
            wrong.append(f"{name} is {value!r}")
    return wrong


# ---- names of earlier versions -------------------------------------------------------


def successor(option: str, value: Any = None) -> str | None:
    """Return a sentence that names the successor of a former option, or None."""
    if option == "replicas":
        return "replicas is called threads now: --threads N, train(threads=N)"
    if option != "strategy":
        return None
    now = {f"zero{n}": f"is --zero {n} now, train(zero={n})" for n in ZERO if n}
    for axis in AXES:
        how = f"is --{axis} N now, train({axis}=N), with the number of ranks along it"
        now[axis] = how
    now |= {n: f"is --data-parallel {n} now" for n in DATA_PARALLEL}
    now["dp"] = "is --threads N now, train(threads=N)"
    now["ddp"] = "is the default: leave it out"
    other = "does not exist; see --data-parallel, --zero, --tp, --pp and --threads"
    return f"strategy {value!r} {now.get(value, other)}"
