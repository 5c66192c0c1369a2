"""How ranks find each other: a port that is really theirs, a meeting without ghosts."""

import contextlib
import socket
import threading
import time
import uuid
from datetime import timedelta

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from ddp_course.launch import rendezvous
from ddp_course.launch.rendezvous import agreed_store, listening_socket

# ---- the port ----------------------------------------------------------------------


def test_the_socket_listens_on_loopback_at_a_port_that_nobody_else_can_take():
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(listening_socket()) for _ in range(50)]
        assert len({listener.getsockname()[1] for listener in sockets}) == 50
        other = stack.enter_context(socket.socket())
        with pytest.raises(OSError):
            other.bind(sockets[0].getsockname())
        assert sockets[0].getsockname()[0] == "127.0.0.1"
        with socket.create_connection(sockets[0].getsockname(), timeout=5):
            sockets[0].accept()[0].close()
    names = [name for _, name in socket.if_nameindex()]
    assert rendezvous.loopback_interface() in names


# ---- the meeting -------------------------------------------------------------------


class Killed(Exception):
    """The agent has ended this rank."""


class Mortal(dist.Store):
    """The store as one rank sees it, until the rank is killed."""

    def __init__(self, store: dist.Store):
        super().__init__()
        self.real = store
        self.killed = threading.Event()
        self.acted = threading.Event()  # its first call of the store has returned

    def set(self, key, value):
        self.alive()
        self.real.set(key, value)
        self.acted.set()

    def get(self, key):
        while not self.check([key], first=False):
            self.acted.set()
            time.sleep(0.001)
        value = self.real.get(key)
        self.acted.set()
        return value

    def check(self, keys, first=True):
        self.alive()
        known = self.real.check(keys)
        if first:
            self.acted.set()
        return known

    def alive(self):
        if self.killed.is_set():
            raise Killed


def attempt(agree, store, world_size, order, number, patience=60.0) -> str:
    """One attempt: the ranks in `order` arrive one after the other and agree.

    If all ranks come, each must meet all the others and nobody of an earlier attempt.
    If only some come, they must wait, and are killed. Return what went wrong, or "".
    """
    mortals = {rank: Mortal(store) for rank in order}
    addresses: dict[int, list[str]] = {}
    fresh: dict[int, bool] = {}
    complete = set(order) == set(range(world_size))

    def live(rank):
        with contextlib.suppress(Killed):
            part = agree(mortals[rank], rank, world_size)
            fresh[rank] = not part.check([f"address/{rank}"])
            part.set(f"address/{rank}", f"attempt {number}")
            addresses[rank] = [
                part.get(f"address/{peer}").decode() for peer in range(world_size)
            ]

    ranks = []
    for rank in order:
        ranks.append(threading.Thread(target=live, args=(rank,), daemon=True))
        ranks[-1].start()
        mortals[rank].acted.wait(60)
    deadline = time.monotonic() + (patience if complete else 0.03)
    for thread in ranks:
        thread.join(max(0.0, deadline - time.monotonic()))
    for mortal in mortals.values():
        mortal.killed.set()
    for thread in ranks:
        thread.join(60)
    if any(thread.is_alive() for thread in ranks):
        return f"attempt {number}: a rank that was killed goes on"
    met = [f"attempt {number}"] * world_size
    if addresses != (dict.fromkeys(range(world_size), met) if complete else {}):
        return f"attempt {number}: the ranks {order} met {addresses}"
    stale = [rank for rank, new in fresh.items() if complete and not new]
    return f"attempt {number}: {stale} found old addresses" if stale else ""


def attempts(agree, world_size, orders, last_patience=60.0) -> str:
    """Run attempts in a row on the same store, as torchrun's agents do.

    Return what went wrong in the first that failed, or "". The last attempt may take
    `last_patience` seconds.
    """
    store = dist.HashStore()
    for number, order in enumerate(orders):
        patience = last_patience if number == len(orders) - 1 else 60.0
        if wrong := attempt(agree, store, world_size, order, number, patience):
            return wrong
    return ""


@pytest.mark.parametrize(
    "orders",
    [[[0], [0]], [[0, 1, 2, 3], [3, 2, 1, 0], [1, 0, 3, 2], [2, 3, 0, 1]]],
    ids=["one rank", "four ranks"],
)
def test_all_ranks_agree_anew_in_each_attempt(orders):
    assert attempts(agreed_store, len(orders[0]), orders) == ""


@pytest.mark.parametrize(
    "incomplete",
    [[0], [1], [1, 2, 3], [0, 1, 2], [3, 0], [0, 3]],
    ids=lambda ranks: "only " + ",".join(map(str, ranks)),
)
def test_an_attempt_in_which_only_some_showed_up_is_forgotten(incomplete):
    whole = [3, 1, 2, 0]
    orders = [whole, incomplete, whole, incomplete, incomplete, whole]
    assert attempts(agreed_store, 4, orders) == ""


@st.composite
def histories(draw):
    """A number of ranks, and who came in each attempt in which order."""
    world_size = draw(st.integers(1, 4))
    everybody = list(range(world_size))
    some = st.lists(st.sampled_from(everybody), unique=True)
    orders = draw(st.lists(some | st.permutations(everybody), max_size=5))
    return world_size, [*orders, draw(st.permutations(everybody))]


@settings(max_examples=15, deadline=None)
@given(histories())
def test_whatever_happened_before_all_ranks_agree(history):
    assert attempts(agreed_store, *history) == ""


def test_a_rank_0_that_never_comes_is_named():
    short = {"timeout": timedelta(seconds=0.1)}
    patient = timedelta(seconds=60)  # for its own connection
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=patient)
    with pytest.raises(TimeoutError, match="^rank 0 did not come to the rendezvous"):
        agreed_store(store, 1, 2, **short)


def always_the_same_name(store, rank, world_size):
    """A planted mistake: the store is used as it is."""
    return dist.PrefixStore("attempt", store)


class CountedOnEachNode:
    """A planted mistake: the attempt is named by torchrun's restart counter.

    Each node's agent counts its own restarts. Ranks 2 and 3 live on node 1, whose
    agent has counted one fewer: it was itself started anew.
    """

    def __init__(self):
        self.starts = {}

    def __call__(self, store, rank, world_size):
        count = self.starts[rank] = self.starts.get(rank, -1) + 1
        late = 1 if rank >= 2 else 0
        return dist.PrefixStore(f"attempt {max(0, count - late)}", store)


def newest_name(store, rank, world_size):
    """A planted mistake: rank 0 names the attempt, the others take what they find."""
    if rank == 0:
        store.set("attempt", uuid.uuid4().hex)
    return dist.PrefixStore(store.get("attempt").decode(), store)


@pytest.mark.parametrize(
    "make_wrong",
    [lambda: always_the_same_name, CountedOnEachNode, lambda: newest_name],
    ids=["always the same", "restart counter", "newest"],
)
def test_meeting_a_ghost_is_caught(make_wrong):
    """These all manage the first attempt: that is why such mistakes survive."""
    assert attempts(make_wrong(), 4, [[0, 1, 2, 3]]) == ""
    results = attempts(make_wrong(), 4, [[0, 1, 2, 3], [3, 2, 1, 0]], 0.3)
    assert results.startswith("attempt 1: ")


def test_the_dead_cannot_hold_up_the_living():
    """What a killed rank has left in the store looks like an attempt that goes on."""
    store = dist.HashStore()
    store.set("attempt", "of the dead")
    for rank in range(4):
        store.set(f"of the dead/hello/{rank}", b"hello")
        store.set(f"of the dead/echo/{rank}", b"hello")
    assert attempt(agreed_store, store, 4, [1, 2, 3, 0], 1) == ""
