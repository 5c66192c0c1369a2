"""What several tests look at, in one launch; and what is refused on every rank."""

import fnmatch
from collections.abc import Callable

import pytest

from ddp_course.launch import spawn
from ddp_course.measure import ByteMeter, TorchCollectives


def launched(n: int | tuple[int, ...], *parts: Callable, **how) -> Callable:
    """Return a module's fixture: by the name of each part, what each of `n` ranks told.

    All parts in one launch, in this order: to start ranks costs more than most of them.
    Of several `n`, every test that asks for the fixture is run with each.
    """

    @pytest.fixture(scope="module", params=n if isinstance(n, tuple) else None)
    def ranks(request) -> dict[str, list]:
        run = {"output": "none", "timeout": 240.0} | how
        run["world_size"] = getattr(request, "param", n)
        results = spawn(lambda: [part() for part in parts], **run)
        names = [part.__name__ for part in parts]
        return dict(zip(names, map(list, zip(*results, strict=True)), strict=True))

    return ranks


def error_of(call: Callable[[], object]) -> str:
    """Return the type and the text of what a call raises; "no error" if nothing."""
    try:
        call()
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def tried(calls: dict[str, Callable[[], object]]) -> dict[str, str]:
    """On a rank: what comes of each call, how many collectives and bytes it sent."""
    results = {}
    for words, call in calls.items():
        with TorchCollectives() as collectives, ByteMeter() as meter:
            error = error_of(call)
        results[words] = f"{error}|{collectives.count()}|{meter.total_sent}"
    return results


def assert_refused(ranks: list[dict[str, str]], kind: str = "ReplicaError: ") -> None:
    """Fail unless all ranks say the same of each call that was `tried`, in its words.

    In the words * is any text. And before it was refused, nothing was sent.
    """
    for words in ranks[0]:
        (text,) = {rank[words] for rank in ranks}
        pattern = f"{kind}{words}|0|0".replace("[", "[[]")
        assert fnmatch.fnmatchcase(text, pattern), (words, text)
