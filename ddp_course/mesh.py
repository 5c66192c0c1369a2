"""The process groups of a mesh: one along each axis, and along several together.

    axes = make_groups(Mesh({"dp": 2, "cp": 2, "tp": 2}), ("dp", "cp"))
    axes.group("tp")            # the two ranks that share each matrix
    axes.group("dp", "cp")      # the four ranks whose gradients are averaged

All ranks of the job make all groups, together and in the same order. Explained in
chapter 09; `coordinates.Mesh` says which ranks they hold.
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

    `process_groups` has a name for each axis, and a tuple of names for axes together.
    """

    mesh: Mesh
    rank: int
    process_groups: Mapping[str | tuple[str, ...], dist.ProcessGroup]

    def __contains__(self, axis: str) -> bool:
        return axis in self.mesh.axes

    def group(self, *axes: str) -> dist.ProcessGroup:
        """Return the group of the ranks along `axes`, this one included.

        Several axes must have been named to `make_groups`.
        """
        self.mesh.check_axes(*axes)
        key = axes if len(axes) > 1 else axes[0]
        if key not in self.process_groups:
            raise ValueError(
                f"there is no group along {' and '.join(axes)} together; name them to "
                f"make_groups(mesh, {axes})"
            )
        return self.process_groups[key]

    def size(self, *axes: str) -> int:
        """Return the number of ranks along `axes`."""
        self.mesh.check_axes(*axes)
        return prod(self.mesh.sizes[axis] for axis in axes)

    def index(self, *axes: str) -> int:
        """Return where this rank is along `axes`: its rank within `group(*axes)`."""
        self.mesh.check_axes(*axes)
        coordinates, index = self.mesh.coordinates(self.rank), 0
        for axis in axes:
            index = index * self.mesh.sizes[axis] + coordinates[axis]
        return index


def make_groups(mesh: Mesh, *together: tuple[str, ...]) -> Axes:
    """Make the process groups of all axes; all ranks of the job call it together.

    `together` are tuples of axes that get a group, too: ("dp", "cp"). Every rank makes
    every group, in the same order, also those that it is not in: that is what
    `new_group` asks for; otherwise some ranks hang. Axes along which all ranks lie take
    the group of all, which exists already. The groups last as long as the job: make
    them once.

    Raises ValueError, on all ranks, if they do not make this mesh, or were given
    different ones. As torch.distributed.device_mesh.init_device_mesh. Chapter 09.
    """
    if not dist.is_initialized():
        how = "call this under spawn or torchrun"
        raise ValueError(f"a mesh {mesh} needs ranks: {how}")

    def check() -> None:
        mesh.check(dist.get_world_size())
        for axes in together:
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
