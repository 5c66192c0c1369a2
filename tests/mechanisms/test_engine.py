"""The engine's promises about order, by what it does with its buckets, on one rank."""

import torch
from modules import Fails
from on_ranks import launched
from torch import nn

from ddp_course.collectives.meeting import quick_exchange
from ddp_course.mechanisms.buckets import Bucket
from ddp_course.mechanisms.engine import AllReduceBuckets, Engine
from ddp_course.mechanisms.recovery import Recovery


class Reports(AllReduceBuckets):
    """A reducer that notes what happens to the buckets, and sends nothing."""

    def __init__(self):
        super().__init__()
        self.log = []

    def pack(self, bucket, slot):
        self.log.append(f"pack {slot.name}")
        super().pack(bucket, slot)

    def launch(self, bucket):
        self.log.append(f"launch {bucket.index}")
        return Handle(self.log, bucket.index)


class Handle:
    def __init__(self, log, index):
        self.log, self.index = log, index

    def wait(self):
        self.log.append(f"wait {self.index}")


def an_engine(names, parts=None):
    """Return an engine, and parameters: each in a bucket, in this order."""
    parameters = {name: nn.Parameter(torch.ones(1)) for name in names}
    engine = Engine(
        Reports(), [Recovery(None, quick_exchange())] if parts is None else parts
    )
    for index, name in enumerate(names):
        form = torch.float32, torch.device("cpu")
        engine.add(Bucket(index, (name,), (0,), 1, *form), parameters)
    return engine, parameters, engine.reducer.log


def product_of(parameters, order):
    """Multiply in an order; backward has the gradients in the opposite one."""
    y = torch.ones(1)
    for name in order:
        y = y * parameters[name]
    return y


def buckets_that_are_full_before_their_turn():
    engine, parameters, log = an_engine("abcd")
    product_of(parameters, "dabc").backward()
    return log


def test_buckets_that_waited_for_their_turn_leave_at_once(one_rank):
    """c and b come before a, whose bucket is the first to be sent; d comes last."""
    [log] = one_rank["buckets_that_are_full_before_their_turn"]
    assert log == [
        *("pack c", "pack b", "pack a", "launch 0", "launch 1", "launch 2"),
        *("pack d", "launch 3", "wait 0", "wait 1", "wait 2", "wait 3"),
    ]


def a_pass_that_fails_and_another():
    engine, parameters, log = an_engine("ab")
    x = Fails.apply(parameters["b"] * 1.0)
    try:
        (x * parameters["a"]).backward()  # a's bucket is under way when it fails
    except ArithmeticError:
        log.append("failed")
    for parameter in parameters.values():
        parameter.grad = None
    product_of(parameters, "ba").backward()
    return log, [parameter.grad.item() for parameter in parameters.values()]


def test_what_a_failed_pass_has_left_is_sent_and_arrives_before_it_is_overwritten(
    one_rank,
):
    [(log, gradients)] = one_rank["a_pass_that_fails_and_another"]
    assert log == [
        *("pack a", "launch 0", "failed", "launch 1", "wait 0", "wait 1"),
        *("pack a", "launch 0", "pack b", "launch 1", "wait 0", "wait 1"),
    ]
    assert gradients == [1.0, 1.0]


class Listener:
    """A part that hears every moment."""

    def __init__(self):
        self.heard = []

    def __getattr__(self, moment):
        def hear(engine, bucket=None):
            self.heard.append(moment if bucket is None else f"{moment} {bucket.index}")

        return hear


def moments():
    engine, parameters, _ = an_engine("ab", parts := [Listener(), object()])
    product_of(parameters, "ba").backward()
    engine.average()
    return parts[0].heard


def test_parts_hear_all_moments_in_order_and_need_not_know_any(one_rank):
    [heard] = one_rank["moments"]
    sent = ["before_launch 0", "after_launch 0", "before_launch 1", "after_launch 1"]
    end = ["before_wait", "after_wait", "after_reduction", "after_backward"]
    assert heard == [
        *("before_backward", "bucket_full 0", *sent[:2], "bucket_full 1", *sent[2:]),
        *("backward_ended", *end, *sent, "backward_ended", *end),
    ]


one_rank = launched(
    1, buckets_that_are_full_before_their_turn, a_pass_that_fails_and_another, moments
)
