"""Layout → device mesh and process groups."""

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hybridcp.communicator import Communicator, DoubleRing, RingCommunicator
from hybridcp.errors import LayoutError
from hybridcp.layout import Layout


@dataclass(frozen=True)
class ContextParallelGroups:
    """The ring, single or double, and the Ulysses group of this rank."""

    ring: RingCommunicator
    ulysses: Communicator


def init_mesh(
    layout: Layout, mesh: DeviceMesh | None = None, *, device_type: str | None = None
) -> DeviceMesh:
    """The device mesh of a layout, axes "ring" and "ulysses" (outer first, as `order` says).

    A double ring has "outer_ring" and "inner_ring" in the place of "ring".

        mesh = init_mesh(layout)                 # all ranks of the job are one cp group
        mesh = init_mesh(layout, world_mesh)     # world_mesh has a "cp" axis, which is split

    Creates the process groups, so call it once, on every rank. Starts torch.distributed from
    torchrun's environment if that has not happened.

    Args:
        layout: the degrees.
        mesh: a mesh with a "cp" axis of U · R ranks; others (dp_shard, tp, …) may be there.
        device_type: "cuda" or "cpu" without a `mesh`; by default CUDA if there is a GPU.

    Raises:
        LayoutError: the number of ranks is not U · R, or `mesh` has no "cp" axis.
    """
    names, sizes = _axes(layout)
    if mesh is not None:
        if "cp" not in (mesh.mesh_dim_names or ()):
            raise LayoutError(
                f'the mesh has axes {mesh.mesh_dim_names}, but none is named "cp"; name the '
                f"context-parallel axis so, with {layout.cp_degree} ranks"
            )
        cp_mesh = mesh["cp"]
        layout.check_ranks(cp_mesh.size())
        _check_same_layout(layout, cp_mesh.get_group())
        # Private in torch 2.13, and the only way to split an axis of an existing mesh.
        return cp_mesh._unflatten(0, sizes, names)
    if device_type is None:
        device_type = "cuda" if torch.cuda.is_available() else "cpu"
    if dist.is_initialized():
        layout.check_ranks(dist.get_world_size())
    else:
        layout.check_ranks(int(os.environ.get("WORLD_SIZE", "1")))
    if device_type == "cuda":
        # NCCL binds a group to the current device: choose it before the first group exists.
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if not dist.is_initialized():
        dist.init_process_group()
    _check_same_layout(layout, dist.group.WORLD)
    return init_device_mesh(device_type, sizes, mesh_dim_names=names)


def resolve_groups(
    layout: Layout, mesh: DeviceMesh | ContextParallelGroups
) -> ContextParallelGroups:
    """The groups of a mesh from `init_mesh`, checked against the layout.

    Raises:
        LayoutError: the mesh lacks the axes of `init_mesh`, or their sizes differ from the
            layout's degrees.
    """
    if isinstance(mesh, DeviceMesh):
        names, _ = _axes(layout)
        if any(name not in (mesh.mesh_dim_names or ()) for name in names):
            raise LayoutError(
                f"the mesh has axes {mesh.mesh_dim_names}, but attention needs {names}; make it "
                "with hybridcp.init_mesh(layout, mesh)"
            )
        by_name = {name: Communicator(mesh.get_group(name)) for name in names}
        groups = ContextParallelGroups(
            ring=by_name["ring"]
            if layout.inner_ring_size is None
            else DoubleRing(by_name["outer_ring"], by_name["inner_ring"]),
            ulysses=by_name["ulysses"],
        )
    elif isinstance(mesh, ContextParallelGroups):
        groups = mesh
    else:
        raise LayoutError(
            f"mesh must be a DeviceMesh from hybridcp.init_mesh(layout), got {type(mesh).__name__}"
        )
    for axis, group, degree in (
        ("ring", groups.ring, layout.ring_degree),
        ("ulysses", groups.ulysses, layout.ulysses_degree),
    ):
        if group.size != degree:
            raise LayoutError(
                f"the layout has {axis}_degree {degree}, but the mesh has {group.size} ranks on "
                f'its "{axis}" axis; make the mesh with hybridcp.init_mesh(layout)'
            )
    inner = groups.ring.inner.size if isinstance(groups.ring, DoubleRing) else None
    if inner != layout.inner_ring_size:
        raise LayoutError(
            f"the layout has inner_ring_size {layout.inner_ring_size}, but the mesh {inner}; make "
            "the mesh with hybridcp.init_mesh(layout)"
        )
    return groups


def mesh_device(mesh: DeviceMesh | ContextParallelGroups) -> torch.device:
    """Where this rank's tensors live: its GPU on a CUDA mesh, else the CPU."""
    if isinstance(mesh, DeviceMesh) and mesh.device_type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _check_same_layout(layout: Layout, group: dist.ProcessGroup | None) -> None:
    """Ranks that create different groups would wait for each other for ever."""
    layouts: list[Layout | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(layouts, layout, group=group)
    for rank, other in enumerate(layouts):
        if other != layouts[0]:
            raise LayoutError(
                f"all ranks must have one layout, but rank 0 of the group has {layouts[0]!r} and "
                f"rank {rank} has {other!r}; save it once and load the same file everywhere"
            )


def _axes(layout: Layout) -> tuple[tuple[str, ...], tuple[int, ...]]:
    names: tuple[str, ...] = ("ring",)
    sizes: tuple[int, ...] = (layout.ring_degree,)
    if layout.inner_ring_size is not None:
        names = ("outer_ring", "inner_ring")
        sizes = (layout.ring_degree // layout.inner_ring_size, layout.inner_ring_size)
    if layout.order == "ulysses_inner":
        return (*names, "ulysses"), (*sizes, layout.ulysses_degree)
    return ("ulysses", *names), (layout.ulysses_degree, *sizes)
