"""A cluster played message by message: what the closed forms are tested against.

Written without them, and without the package's own plans. A *program* is a list of
rounds, a round a list of messages that are sent together; `play` moves the data, keeps
a clock per rank, and counts what every rank sends.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

MESSAGES, BYTES = (1, 0), (0, 1)  # prices: alpha, beta
FREE = (0, 0)


@dataclass
class Program:
    n: int
    chunk: Fraction  # of S
    start: Callable[[int], dict]  # rank -> {chunk: ranks whose numbers it holds}
    end: Callable[[int], dict]
    rounds: list[list[tuple]]  # (src, dst, chunks, add)
    per_node: int = 0  # ranks per node; 0: all on one


def play(program, inside, between=FREE):
    """Return (time, bytes sent inside, bytes sent between), at these prices."""
    n, per_node = program.n, program.per_node or program.n
    data, wanted = (
        [{c: frozenset(ranks) for c, ranks in chunks(r).items()} for r in range(n)]
        for chunks in (program.start, program.end)
    )
    clock, sent = [Fraction(0)] * n, {True: [Fraction(0)] * n, False: [Fraction(0)] * n}
    for messages in program.rounds:
        assert len({m[0] for m in messages}) == len(messages), "two sends at once"
        assert len({m[1] for m in messages}) == len(messages), "two receives at once"
        before, then = [dict(chunks) for chunks in data], list(clock)
        for src, dst, chunks, add in messages:
            assert src != dst
            near = src // per_node == dst // per_node
            alpha, beta = inside if near else between
            size = program.chunk * len(chunks)
            sent[near][src] += size
            done = max(then[src], then[dst]) + alpha + beta * size
            clock[src], clock[dst] = max(clock[src], done), max(clock[dst], done)
            for c in chunks:
                new = before[src][c]
                if add:
                    assert not new & data[dst][c], "something is added twice"
                    new = new | data[dst][c]
                data[dst][c] = new
    for rank, (chunks, wants) in enumerate(zip(data, wanted, strict=True)):
        assert wants.items() <= chunks.items(), (rank, chunks, wants)
    return max(clock), sent[True], sent[False]


def star(ranks):
    """Rounds of pairs, from ranks[0] to one after the other."""
    return [[(ranks[0], rank)] for rank in ranks[1:]]


def tree(ranks):
    """Rounds of pairs, from ranks[0]: the last one is between neighbours."""
    if len(ranks) < 2:
        return []
    return [*tree(ranks[::2]), [*zip(ranks[::2], ranks[1::2], strict=False)]]


def down(edges, chunks):
    return [[(a, b, chunks, False) for a, b in pairs] for pairs in edges]


def up(edges, chunks):
    """The same backwards, to be added."""
    return [[(b, a, chunks, True) for a, b in pairs] for pairs in reversed(edges)]


def from_root(n, root):
    return [(root + k) % n for k in range(n)]


def at(root, chunks):
    """The root holds this, and the others nothing."""
    return lambda r: chunks if r == root else {}


def broadcast(n, root, way):
    rounds = down(way(from_root(n, root)), [0])
    return Program(n, 1, at(root, {0: [root]}), lambda r: {0: [root]}, rounds)


def reduce(n, root, way):
    rounds = up(way(from_root(n, root)), [0])
    return Program(n, 1, lambda r: {0: [r]}, at(root, {0: range(n)}), rounds)


def all_reduce_rooted(n, root, way):
    rounds = reduce(n, root, way).rounds + broadcast(n, root, way).rounds
    return all_reduce(n, 1, rounds)


def rooted(collective, way):
    return lambda n, root=0: collective(n, root, way)


broadcast_naive, broadcast_tree = rooted(broadcast, star), rooted(broadcast, tree)
reduce_naive, reduce_tree = rooted(reduce, star), rooted(reduce, tree)
all_reduce_naive = rooted(all_reduce_rooted, star)
all_reduce_tree = rooted(all_reduce_rooted, tree)


def scatter(n, root=0):
    start = at(root, {c: [root] for c in range(n)})
    rounds = [[(root, r, [r], False)] for r in range(n) if r != root]
    return Program(n, Fraction(1, n), start, lambda r: {r: [root]}, rounds)


def gather(n, root=0):
    end = at(root, {c: [c] for c in range(n)})
    rounds = [[(r, root, [r], False)] for r in range(n) if r != root]
    return Program(n, Fraction(1, n), lambda r: {r: [r]}, end, rounds)


def ring(ranks, parts, add):
    """Around a ring: part i, a list of chunks, is added up on its way to ranks[i].

    If nothing is added it goes from there to all.
    """
    n = len(ranks)
    return [
        [
            (ranks[i], ranks[(i + 1) % n], parts[(i - k - add) % n], add)
            for i in range(n)
        ]
        for k in range(n - 1)
    ]


def all_gather(n):
    rounds = ring(range(n), [[c] for c in range(n)], add=False)
    end = {c: [c] for c in range(n)}
    return Program(n, Fraction(1, n), lambda r: {r: [r]}, lambda r: end, rounds)


def reduce_scatter(n):
    rounds = ring(range(n), [[c] for c in range(n)], add=True)
    start, end = lambda r: {c: [r] for c in range(n)}, lambda r: {r: range(n)}
    return Program(n, Fraction(1, n), start, end, rounds)


def all_to_all(n):
    start, end = (
        lambda r: {(r, d): [r] for d in range(n)},
        lambda r: {(s, r): [s] for s in range(n)},
    )
    rounds = [
        [(r, (r + k) % n, [(r, (r + k) % n)], False) for r in range(n)]
        for k in range(1, n)
    ]
    return Program(n, Fraction(1, n), start, end, rounds)


def all_reduce(n, chunks, rounds, per_node=0):
    start, end = (
        lambda r: {c: [r] for c in range(chunks)},
        lambda r: {c: range(n) for c in range(chunks)},
    )
    return Program(n, Fraction(1, chunks), start, end, rounds, per_node)


def all_reduce_ring(n):
    return all_reduce(n, n, reduce_scatter(n).rounds + all_gather(n).rounds)


def all_reduce_halving_doubling(n):
    p = 1
    while 2 * p <= n:
        p *= 2
    mine = [list(range(p)) for _ in range(p)]  # the chunks a rank still works on
    forward, back, distance = [], [], p // 2
    while distance:
        halves = [[c for c in mine[r] if (c ^ r) & distance == 0] for r in range(p)]
        partner = [r ^ distance for r in range(p)]
        forward.append([(r, partner[r], halves[partner[r]], True) for r in range(p)])
        back.append([(r, partner[r], halves[r], False) for r in range(p)])
        mine, distance = halves, distance // 2
    fold = [[(r, r - p, list(range(p)), True) for r in range(p, n)]]
    unfold = [[(r - p, r, list(range(p)), False) for r in range(p, n)]]
    return all_reduce(n, p, fold + forward + back[::-1] + unfold)


def together(programs):
    """Rounds of different groups of ranks, side by side."""
    return [sum(steps, []) for steps in zip(*programs, strict=True)]


def hierarchical_leader(nnodes, g):
    nodes = [range(k * g, (k + 1) * g) for k in range(nnodes)]
    every, leaders = list(range(nnodes)), [node[0] for node in nodes]
    parts = [[c] for c in every]
    rounds = (
        together(up(tree(node), every) for node in nodes)
        + ring(leaders, parts, add=True)
        + ring(leaders, parts, add=False)
        + together(down(tree(node), every) for node in nodes)
    )
    return all_reduce(nnodes * g, nnodes, rounds, per_node=g)


def hierarchical_sharded(nnodes, g):
    nodes = [range(k * g, (k + 1) * g) for k in range(nnodes)]
    shards = [list(range(i * nnodes, (i + 1) * nnodes)) for i in range(g)]
    across = [range(i, nnodes * g, g) for i in range(g)]
    parts = [[[c] for c in shard] for shard in shards]
    pairs = list(zip(across, parts, strict=True))
    rounds = (
        together(ring(node, shards, add=True) for node in nodes)
        + together(ring(*pair, add=True) for pair in pairs)
        + together(ring(*pair, add=False) for pair in pairs)
        + together(ring(node, shards, add=False) for node in nodes)
    )
    return all_reduce(nnodes * g, nnodes * g, rounds, per_node=g)
