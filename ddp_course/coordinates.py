"""A mesh: every rank has a coordinate on each axis.

With two kinds of parallelism at once, four ranks form a table. Each of its lines is a
replica, with its own part of the batch (dp); the ranks in a line share one model (tp):

               tp 0  tp 1        groups along tp:  (0, 1) (2, 3)
        dp 0      0     1        groups along dp:  (0, 2) (1, 3)
        dp 1      2     3

Each rank is in one group of each axis: rank 2 computes with rank 3, and averages its
gradients with rank 0. The last axis is the fastest: its ranks are neighbours, on one
node as long as nodes are large enough. So the axis that communicates most comes last:
dp, pp, tp (Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on
GPU Clusters Using Megatron-LM", section 3.5).

`Mesh` is plain data and needs no process; `mesh.make_groups` creates the process
groups. PyTorch's `DeviceMesh` (torch/distributed/device_mesh.py) combines the two and
numbers the ranks in the same way. Explained in chapter 09.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from numbers import Integral


@dataclass(frozen=True, init=False, repr=False)
class Mesh:
    """A table of ranks: named axes and their sizes, the last axis fastest.

        Mesh({"dp": 2, "tp": 3}).coordinates(3)           # {"dp": 1, "tp": 0}

    Attributes:
        axes: the names, slowest first.
        shape: the number of ranks along each axis.

    Raises ValueError for a mesh without axes, an axis whose name is not a Python
    identifier, or a size below 1.
    """

    axes: tuple[str, ...]
    shape: tuple[int, ...]

    def __init__(self, sizes: Mapping[str, int]) -> None:
        if not isinstance(sizes, Mapping) or not sizes:
            how = "a mesh needs an axis, as in Mesh({'dp': 2, 'tp': 2})"
            raise ValueError(f"sizes is {sizes!r}; {how}")
        for axis, size in sizes.items():
            if not isinstance(axis, str) or not axis.isidentifier():
                raise ValueError(f"the axis {axis!r} must be a name, such as 'tp'")
            if type(size) is not int or size < 1:
                raise ValueError(
                    f"the axis {axis} has size {size!r}; it must be a whole number >= 1"
                )
        object.__setattr__(self, "axes", tuple(sizes))
        object.__setattr__(self, "shape", tuple(sizes.values()))

    @property
    def size(self) -> int:
        """The number of ranks."""
        return prod(self.shape)

    @property
    def sizes(self) -> dict[str, int]:
        """The number of ranks along each axis, by name."""
        return dict(zip(self.axes, self.shape, strict=True))

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the coordinate of `rank` (0 to size - 1) on each axis."""
        last = self.size - 1
        if not isinstance(rank, Integral) or not 0 <= rank <= last:
            raise ValueError(
                f"rank is {rank!r}; in a mesh {self} it can be 0 to {last}"
            )
        found = {}
        for axis, size in reversed(self.sizes.items()):
            rank, found[axis] = divmod(rank, size)
        return {axis: found[axis] for axis in self.axes}

    def groups(self, *axes: str) -> list[list[int]]:
        """Return all groups along `axes`: ranks that differ only in these coordinates.

        A group along several axes, `groups("dp", "cp")`, has as many ranks as the
        product of their sizes. The groups are ordered by their first ranks.
        """
        self.check_axes(*axes)
        found: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.size):
            others = self.coordinates(rank) | dict.fromkeys(axes, 0)
            found.setdefault(tuple(others.values()), []).append(rank)
        return list(found.values())

    def check(self, world_size: int) -> None:
        """Raise ValueError unless this mesh has `world_size` ranks."""
        if world_size != self.size:
            raise ValueError(
                f"a mesh {self} needs {self.size} ranks, and the world size is "
                f"{world_size}; start as many ranks as the mesh has, or change the mesh"
            )

    def check_axes(self, *axes: str) -> None:
        """Raise ValueError unless these are axes of the mesh, in its order."""
        for axis in axes:
            if axis not in self.axes:
                raise ValueError(f"axis is {axis!r}; it can be {', '.join(self.axes)}")
        if not axes or axes != tuple(axis for axis in self.axes if axis in axes):
            raise ValueError(
                f"axes are {', '.join(axes) or 'none'}; name one or more, in the order "
                f"of the mesh {self}"
            )

    def describe(self) -> str:
        """Return the table of all ranks."""
        *slow, fast = self.axes
        firsts = [self.coordinates(group[0]) for group in self.groups(fast)]
        heads = [", ".join(f"{a} {here[a]}" for a in slow) for here in firsts]
        names = [f"{fast} {i}" for i in range(self.shape[-1])]
        width, cell_width = max(map(len, heads)), max(map(len, names)) + 2
        rows = zip(["", *heads], [names, *self.groups(fast)], strict=True)
        return "\n".join(
            f"{head:<{width}}" + "".join(f"{cell:>{cell_width}}" for cell in cells)
            for head, cells in rows
        )

    def __repr__(self) -> str:
        return f"Mesh({self.sizes})"

    def __str__(self) -> str:
        return " x ".join(f"{axis} {size}" for axis, size in self.sizes.items())
