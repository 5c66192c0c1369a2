"""The process groups of a mesh: one along each axis, and along several together.

    axes = make_groups(Mesh({"dp": 2, "cp": 2, "tp": 2}), ("dp", "cp"))
    axes.group("tp")            # the two ranks that share each matrix
    axes.group("dp", "cp")      # the four ranks whose gradients are averaged

All ranks of the job create all groups, together and in the same order. Explained in
chapter 09; `coordinates.Mesh` says which ranks each group has.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import torch.distributed as dist

from ddp_course.coordinates import Mesh
from ddp_course.mechanisms.agreement import agreed


@dataclass(frozen=True)
class Axes:
    """This rank's process groups in a mesh.

    The keys of `process_groups` are names of axes, and tuples of names for groups along
    several axes.
    """

    mesh: Mesh
    rank: int
    process_groups: Mapping[str | tuple[str, ...], dist.ProcessGroup]

    def __contains__(self, axis: str) -> bool:
        return axis in self.mesh.axes

    def group(self, *axes: str) -> dist.ProcessGroup:
        """Return the group of the ranks along `axes`, this rank included.

        Raises ValueError for several axes that were not passed to `make_groups`.
        """
        self.mesh.check_axes(*axes)
        key = axes if len(axes) > 1 else axes[0]
        if key not in self.process_groups:
            raise ValueError(
                f"there is no group along {' and '.join(axes)} together; pass them to "
                f"make_groups(mesh, {axes})"
            )
        return self.process_groups[key]

    def size(self, *axes: str) -> int:
        """Return the number of ranks along `axes`."""
        self.mesh.check_axes(*axes)
        return prod(self.mesh.sizes[axis] for axis in axes)

    def index(self, *axes: str) -> int:
        """Return this rank's place along `axes`: its rank within `group(*axes)`."""
        self.mesh.check_axes(*axes)
        coordinates, index = self.mesh.coordinates(self.rank), 0
        for axis in axes:
            index = index * self.mesh.sizes[axis] + coordinates[axis]
        return index


def make_groups(mesh: Mesh, *together: tuple[str, ...]) -> Axes:
    """Create the process groups of all axes; all ranks of the job call it together.

    Each tuple in `together`, such as ("dp", "cp"), names axes that get one more group.
    Every rank creates every group, in the same order, even groups that it is not in:
    `new_group` requires this, and ranks would hang otherwise. A group of all ranks is
    not created; it is the default group. The groups last as long as the job, so call
    this once.

    Raises ValueError, on all ranks, if the mesh and the job have different numbers of
    ranks, or if the ranks passed different meshes. Does what
    torch.distributed.device_mesh.init_device_mesh does. Chapter 09.
    """
    if not dist.is_initialized():
        how = "call this under spawn or torchrun"
        raise ValueError(f"a mesh {mesh} needs ranks: {how}")

    def check() -> None:
        if not isinstance(mesh, Mesh):
            raise ValueError(f"mesh is {mesh!r}; it must be a Mesh, or a layout.mesh")
        mesh.check(dist.get_world_size())
        for axes in together:
            if not isinstance(axes, tuple):
                how = "pass a tuple of names for each group, such as ('dp', 'cp')"
                raise ValueError(f"together has {axes!r}; {how}")
            mesh.check_axes(*axes)

    form = {"the mesh": repr(mesh), "together": repr(together)}
    agreed(check, None, **form)
    me, mine = dist.get_rank(), {}
    for axes in (*((axis,) for axis in mesh.axes), *together):
        for ranks in mesh.groups(*axes):
            everybody = len(ranks) == mesh.size
            group = dist.group.WORLD if everybody else dist.new_group(ranks)
            if me in ranks:
                mine[axes if len(axes) > 1 else axes[0]] = group
    return Axes(mesh, me, mine)
