"""A mesh has the numbers and groups of PyTorch's DeviceMesh; it is plain data."""

import pickle
from itertools import product

import pytest
import torch
import torch.distributed as dist
from refusals import refused, said
from torch.distributed.device_mesh import init_device_mesh

from ddp_course.launch import spawn
from ddp_course.mesh import Axes, Mesh, make_groups

SHAPES = [
    {"dp": 2, "tp": 2},
    {"dp": 2, "pp": 1, "tp": 2},
    {"pp": 4},
    {"dp": 1, "tp": 4},
    {"dp": 4, "tp": 1},
]

# Plain data


@pytest.mark.parametrize("shape", [(4,), (2, 3), (3, 2), (2, 3, 4), (2, 1, 3), (1,)])
def test_a_mesh_is_a_table_of_ranks_read_row_by_row(shape):
    names = ("dp", "pp", "tp")[: len(shape)]
    mesh = Mesh(dict(zip(names, shape, strict=True)))
    table = torch.arange(mesh.size).view(shape)
    for place in product(*map(range, shape)):
        coordinates = dict(zip(names, place, strict=True))
        rank = int(table[place])
        assert mesh.coordinates(rank) == coordinates
        assert list(mesh.coordinates(rank)) == list(names)
    for dim, axis in enumerate(names):
        groups = table.movedim(dim, -1).reshape(-1, shape[dim]).tolist()
        assert mesh.groups(axis) == groups
        assert mesh.sizes[axis] == shape[dim]


@pytest.mark.parametrize("axes", [("dp", "cp"), ("dp", "tp"), ("cp", "tp")])
def test_groups_along_two_axes_hold_the_ranks_that_differ_there_alone(axes):
    mesh = Mesh({"dp": 2, "cp": 3, "tp": 2})
    table = torch.arange(12).view(2, 3, 2)
    third = ({0, 1, 2} - {mesh.axes.index(axis) for axis in axes}).pop()
    assert (
        mesh.groups(*axes)
        == table.movedim(third, 0).reshape(-1, 12 // table.shape[third]).tolist()
    )
    assert mesh.groups(*mesh.axes) == [[*range(12)]]


def test_a_mesh_is_a_value():
    mesh = Mesh({"dp": 2, "tp": 3})
    assert mesh == Mesh({"dp": 2, "tp": 3}) == pickle.loads(pickle.dumps(mesh))
    assert eval(repr(mesh)) == mesh and hash(eval(repr(mesh))) == hash(mesh)
    assert mesh != Mesh({"tp": 3, "dp": 2})  # other neighbours
    assert str(mesh) == "dp 2 x tp 3"
    sizes = {"dp": 2}
    mesh = Mesh(sizes)
    sizes["dp"] = 3
    assert mesh.size == 2
    with pytest.raises(AttributeError):
        mesh.shape = (3,)


def test_it_is_printed_as_a_table():
    mesh = Mesh({"dp": 2, "pp": 2, "tp": 2})
    assert mesh.describe().splitlines() == [
        "            tp 0  tp 1",
        "dp 0, pp 0     0     1",
        "dp 0, pp 1     2     3",
        "dp 1, pp 0     4     5",
        "dp 1, pp 1     6     7",
    ]
    assert Mesh({"tp": 2}).describe() == "  tp 0  tp 1\n     0     1"


test_what_is_no_mesh_is_refused = refused(
    (lambda: Mesh({}), "sizes is {}; a mesh needs an axis"),
    (lambda: Mesh((2, 2)), r"sizes is \(2, 2\); a mesh needs an axis, as in Mesh"),
    (lambda: Mesh({"dp": 0}), "axis dp has size 0; it must be a whole number >= 1"),
    (lambda: Mesh({"dp": 2.0}), "size 2.0"),
    (lambda: Mesh({"dp": True}), "size True"),
    (lambda: Mesh({"d p": 2}), "the axis 'd p' must be a name"),
    (lambda: Mesh({1: 2}), "the axis 1 must be a name"),
)
SQUARE = Mesh({"dp": 2, "tp": 2})
test_what_a_mesh_does_not_have_is_refused = refused(
    (lambda: SQUARE.coordinates(4), "4; in a mesh dp 2 x tp 2 it can be 0 to"),
    (lambda: SQUARE.coordinates(-1), "rank is -1"),
    (lambda: SQUARE.coordinates("1"), "rank is '1'; in a mesh dp 2 x tp 2"),
    (lambda: SQUARE.groups("pp"), "axis is 'pp'; it can be dp, tp"),
    (lambda: SQUARE.groups("dp", "pp"), "axis is 'pp'; it can be dp, tp"),
    (lambda: SQUARE.groups("tp", "dp"), "axes are tp, dp; name one or more, in the"),
    (lambda: SQUARE.groups("dp", "dp"), "axes are dp, dp; name one or more, in the"),
    (lambda: SQUARE.groups(), "axes are none; name one or more"),
    (
        lambda: SQUARE.check(3),
        "a mesh dp 2 x tp 2 needs 4 ranks, and the world size is 3",
    ),
    (lambda: SQUARE.check(1), "and the world size is 1;"),
    (lambda: make_groups(SQUARE), "a mesh dp 2 x tp 2 needs ranks"),
)


# Ranks


def seen_by(axes: Axes) -> dict[str, tuple]:
    """What this rank is in each of its groups, and whom a message there reaches."""
    seen = {}
    for axis in axes.mesh.axes:
        group = axes.group(axis)
        total = torch.tensor(10 ** dist.get_rank())
        dist.all_reduce(total, group=group)  # 1010: ranks 1 and 3
        ranks = dist.get_process_group_ranks(group)
        seen[axis] = (axes.size(axis), axes.index(axis), ranks, int(total))
    return seen


def as_pytorch(sizes: dict[str, int]) -> dict[str, tuple]:
    """The same of PyTorch's mesh."""
    mesh = init_device_mesh(
        "cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes)
    )  # fmt: skip
    seen = {}
    for dim, axis in enumerate(sizes):
        ranks = dist.get_process_group_ranks(mesh.get_group(axis))
        total = sum(10**rank for rank in ranks)
        seen[axis] = (mesh.size(dim), mesh.get_local_rank(axis), ranks, total)
    return seen


def swapped(mesh: Mesh) -> Axes:
    """The plant: a rank takes the group along the other axis."""
    axes = make_groups(mesh)
    groups = dict(zip(mesh.axes, reversed(axes.process_groups.values()), strict=True))
    return Axes(mesh, axes.rank, groups)


def on_every_rank():
    ours = [seen_by(make_groups(Mesh(sizes))) for sizes in SHAPES]
    wrong = seen_by(swapped(Mesh(SHAPES[0])))
    unequal = [{"dp": 2, "tp": 2}, {"tp": 2, "dp": 2}][dist.get_rank() % 2]
    bad = (Mesh({"dp": 3}),), (Mesh(unequal),), ({"dp": 4},), (SQUARE, "dp", "tp")
    messages = [said(ValueError, make_groups, *args) for args in bad]
    return ours, [as_pytorch(sizes) for sizes in SHAPES], wrong, messages


def test_groups_are_those_of_pytorchs_device_mesh():
    for rank, (ours, pytorchs, wrong, messages) in enumerate(
        spawn(on_every_rank, world_size=4, timeout=120)
    ):
        assert ours == pytorchs
        assert wrong != pytorchs[0]
        assert ours[0]["tp"][2] == [[0, 1], [2, 3]][rank // 2]
        assert ours[0]["dp"][3] == [101, 1010][rank % 2]
        size, order, kind, names = messages
        assert "mesh is {'dp': 4}; it must be a Mesh" in kind
        assert "together has 'dp'; pass a tuple of names for each group" in names
        assert "a mesh dp 3 needs 3 ranks, and the world size is 4" in size
        assert "the mesh is Mesh({'dp': 2, 'tp': 2}) on ranks 0, 2" in order
        assert "Mesh({'tp': 2, 'dp': 2}) on ranks 1, 3" in order


TOGETHER = Mesh({"dp": 2, "cp": 2, "tp": 2})


def on_eight_ranks() -> tuple:
    """Return what this rank is along dp and cp together, in our mesh and PyTorch's."""
    axes = make_groups(TOGETHER, ("dp", "cp"))
    total = torch.tensor(10 ** dist.get_rank())
    dist.all_reduce(total, group=axes.group("dp", "cp"))
    wrong = [
        said(ValueError, axes.group, "cp", "tp"),
        said(ValueError, make_groups, TOGETHER, ("cp", "dp")),
        said(
            ValueError, make_groups, TOGETHER, *[("dp", "cp")] * (dist.get_rank() % 2)
        ),
    ]
    theirs = init_device_mesh("cpu", TOGETHER.shape, mesh_dim_names=TOGETHER.axes)
    flat = theirs["dp", "cp"]._flatten()
    group = flat.get_group()
    seen = axes.size("dp", "cp"), axes.index("dp", "cp"), int(total)
    ranks = dist.get_process_group_ranks(group)
    pytorchs = flat.size(), flat.get_local_rank(), sum(10**rank for rank in ranks)
    return seen, pytorchs, wrong


def test_a_group_along_two_axes_is_pytorchs_flattened_mesh():
    for rank, (seen, pytorchs, wrong) in enumerate(
        spawn(on_eight_ranks, world_size=8, timeout=120)
    ):
        assert seen == pytorchs
        assert seen[2] == [1010101, 10101010][rank % 2]
        missing, order, unequal = wrong
        assert "no group along cp and tp together; pass them to make_groups" in missing
        assert "axes are cp, dp; name one or more, in the order of the mesh" in order
        assert "(('dp', 'cp'),) on ranks 1, 3, 5, 7" in unequal
