"""A cluster played message by message: what the closed forms are tested against.

Written without them, and without the package's own plans. A *program* is a list of
rounds, a round a list of messages that are sent together; `play` moves the data, keeps
a clock per rank, and counts what every rank sends.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

MESSAGES, BYTES = (1, 0), (0, 1)  # prices: alpha, beta
FREE = (0, 0)


@dataclass
class Program:
    n: int
    chunk: Fraction  # of S
    start: list[dict]  # rank -> {chunk: set of ranks whose numbers it holds}
    end: list[dict]
    rounds: list[list[tuple]]  # (src, dst, chunks, add)
    per_node: int = 0  # ranks per node; 0: all on one


def play(program, inside, between=FREE):
    """Return (time, bytes sent inside, bytes sent between), at these prices."""
    n, per_node = program.n, program.per_node or program.n
    data = [dict(held) for held in program.start]
    clock, sent = [Fraction(0)] * n, {True: [Fraction(0)] * n, False: [Fraction(0)] * n}
    for messages in program.rounds:
        assert len({m[0] for m in messages}) == len(messages), "two sends at once"
        assert len({m[1] for m in messages}) == len(messages), "two receives at once"
        before, then = [dict(held) for held in data], list(clock)
        for src, dst, chunks, add in messages:
            assert src != dst
            near = src // per_node == dst // per_node
            alpha, beta = inside if near else between
            size = program.chunk * len(chunks)
            sent[near][src] += size
            end = max(then[src], then[dst]) + alpha + beta * size
            clock[src], clock[dst] = max(clock[src], end), max(clock[dst], end)
            for c in chunks:
                new = before[src][c]
                if add:
                    assert not new & data[dst][c], "something is added twice"
                    new = new | data[dst][c]
                data[dst][c] = new
    for rank, wanted in enumerate(program.end):
        for c, origins in wanted.items():
            assert data[rank][c] == origins, (rank, c, data[rank].get(c), origins)
    return max(clock), sent[True], sent[False]


def one_by_one(messages):
    return [[m] for m in messages]


def everyone(n, chunks):
    return [{c: frozenset([r]) for c in range(chunks)} for r in range(n)]


def the_sum(n, chunks):
    return [{c: frozenset(range(n)) for c in range(chunks)} for _ in range(n)]


def all_reduce(n, chunks, rounds, per_node=0):
    size = Fraction(1, chunks)
    return Program(n, size, everyone(n, chunks), the_sum(n, chunks), rounds, per_node)


def tree_up(ranks):
    """Reduce to ranks[0]: neighbours first, then those that are left."""
    rounds, left = [], list(ranks)
    while len(left) > 1:
        rounds.append(list(zip(left[1::2], left[::2], strict=False)))
        left = left[::2]
    return rounds


def tree_down(ranks):
    return [[(b, a) for a, b in edges] for edges in reversed(tree_up(ranks))]


def messages(edges, chunks, add):
    return [[(a, b, chunks, add) for a, b in step] for step in edges]


def from_root(n, root):
    return [(root + k) % n for k in range(n)]


def broadcast(n, root, edges):
    start = [{0: frozenset([root])} if r == root else {} for r in range(n)]
    end = [{0: frozenset([root])}] * n
    return Program(n, Fraction(1), start, end, messages(edges, [0], False))


def broadcast_naive(n, root=0):
    return broadcast(n, root, [[(root, r)] for r in range(n) if r != root])


def broadcast_tree(n, root=0):
    return broadcast(n, root, tree_down(from_root(n, root)))


def reduce(n, root, edges):
    end = [{} for _ in range(n)]
    end[root] = {0: frozenset(range(n))}
    return Program(n, Fraction(1), everyone(n, 1), end, messages(edges, [0], True))


def reduce_naive(n, root=0):
    return reduce(n, root, [[(r, root)] for r in range(n) if r != root])


def reduce_tree(n, root=0):
    return reduce(n, root, tree_up(from_root(n, root)))


def scatter(n, root=0):
    start = [{} for _ in range(n)]
    start[root] = {c: frozenset([root]) for c in range(n)}
    end = [{r: frozenset([root])} for r in range(n)]
    rounds = one_by_one((root, r, [r], False) for r in range(n) if r != root)
    return Program(n, Fraction(1, n), start, end, rounds)


def gather(n, root=0):
    end = [{} for _ in range(n)]
    end[root] = {c: frozenset([c]) for c in range(n)}
    start = [{r: frozenset([r])} for r in range(n)]
    rounds = one_by_one((r, root, [r], False) for r in range(n) if r != root)
    return Program(n, Fraction(1, n), start, end, rounds)


def ring_reduce_scatter(ranks, parts):
    """Part i, a list of chunks, ends complete on ranks[i]."""
    n = len(ranks)
    return [
        [(ranks[i], ranks[(i + 1) % n], parts[(i - k - 1) % n], True) for i in range(n)]
        for k in range(n - 1)
    ]


def ring_all_gather(ranks, parts):
    n = len(ranks)
    return [
        [(ranks[i], ranks[(i + 1) % n], parts[(i - k) % n], False) for i in range(n)]
        for k in range(n - 1)
    ]


def all_gather(n):
    start = [{r: frozenset([r])} for r in range(n)]
    end = [{c: frozenset([c]) for c in range(n)}] * n
    rounds = ring_all_gather(range(n), [[c] for c in range(n)])
    return Program(n, Fraction(1, n), start, end, rounds)


def reduce_scatter(n):
    end = [{r: frozenset(range(n))} for r in range(n)]
    rounds = ring_reduce_scatter(range(n), [[c] for c in range(n)])
    return Program(n, Fraction(1, n), everyone(n, n), end, rounds)


def all_to_all(n):
    start = [{(r, d): frozenset([r]) for d in range(n)} for r in range(n)]
    end = [{(s, r): frozenset([s]) for s in range(n)} for r in range(n)]
    rounds = [
        [(r, (r + k) % n, [(r, (r + k) % n)], False) for r in range(n)]
        for k in range(1, n)
    ]
    return Program(n, Fraction(1, n), start, end, rounds)


def all_reduce_naive(n, root=0):
    up = one_by_one((r, root, [0], True) for r in range(n) if r != root)
    down = one_by_one((root, r, [0], False) for r in range(n) if r != root)
    return all_reduce(n, 1, up + down)


def all_reduce_tree(n, root=0):
    ranks = from_root(n, root)
    up, down = tree_up(ranks), tree_down(ranks)
    return all_reduce(n, 1, messages(up, [0], True) + messages(down, [0], False))


def all_reduce_ring(n):
    parts = [[c] for c in range(n)]
    rounds = ring_reduce_scatter(range(n), parts) + ring_all_gather(range(n), parts)
    return all_reduce(n, n, rounds)


def all_reduce_halving_doubling(n):
    p = 1
    while 2 * p <= n:
        p *= 2
    mine = [list(range(p)) for _ in range(p)]  # the chunks a rank still works on
    down, up, distance = [], [], p // 2
    while distance:
        halves = [[c for c in mine[r] if (c ^ r) & distance == 0] for r in range(p)]
        partner = [r ^ distance for r in range(p)]
        down.append([(r, partner[r], halves[partner[r]], True) for r in range(p)])
        up.append([(r, partner[r], halves[r], False) for r in range(p)])
        mine, distance = halves, distance // 2
    fold = [[(r, r - p, list(range(p)), True) for r in range(p, n)]]
    unfold = [[(r - p, r, list(range(p)), False) for r in range(p, n)]]
    return all_reduce(n, p, fold + down + up[::-1] + unfold)


def together(programs):
    """Rounds of different groups of ranks, side by side."""
    return [sum(steps, []) for steps in zip(*programs, strict=True)]


def hierarchical_leader(nnodes, g):
    nodes = [range(k * g, (k + 1) * g) for k in range(nnodes)]
    every, leaders = list(range(nnodes)), [node[0] for node in nodes]
    parts = [[c] for c in every]
    rounds = (
        together(messages(tree_up(node), every, True) for node in nodes)
        + ring_reduce_scatter(leaders, parts)
        + ring_all_gather(leaders, parts)
        + together(messages(tree_down(node), every, False) for node in nodes)
    )
    return all_reduce(nnodes * g, nnodes, rounds, per_node=g)


def hierarchical_sharded(nnodes, g):
    nodes = [range(k * g, (k + 1) * g) for k in range(nnodes)]
    shards = [list(range(i * nnodes, (i + 1) * nnodes)) for i in range(g)]
    across = [range(i, nnodes * g, g) for i in range(g)]
    parts = [[[c] for c in shard] for shard in shards]
    pairs = list(zip(across, parts, strict=True))
    rounds = (
        together(ring_reduce_scatter(node, shards) for node in nodes)
        + together(ring_reduce_scatter(*pair) for pair in pairs)
        + together(ring_all_gather(*pair) for pair in pairs)
        + together(ring_all_gather(node, shards) for node in nodes)
    )
    return all_reduce(nnodes * g, nnodes * g, rounds, per_node=g)
