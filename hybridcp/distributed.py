"""Layout → device mesh and process groups, and the three transfers that attention needs.

Everything takes an explicit group; the default process group is never used. Peers are ranks
within the group, so a group without global rank 0 works like any other.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hybridcp.errors import LayoutError
from hybridcp.layout import Layout

# Tags keep two exchanges between the same two ranks apart, whatever order they complete in.
KV_TAG = 0
GRADIENT_TAG = 1


class Communicator:
    """Transfers within one process group.

    Args:
        group: the process group, or None for a group of one rank, which moves nothing.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.rank: int = group.rank() if group is not None else 0
        self.size: int = group.size() if group is not None else 1

    def all_to_all(
        self,
        received: torch.Tensor,
        sent: torch.Tensor,
        receive_sizes: Sequence[int],
        send_sizes: Sequence[int],
    ) -> None:
        """Send consecutive pieces of `sent`, one to each rank; wait for theirs.

        Args:
            received: flat, contiguous; filled in rank order.
            sent: flat, contiguous, same dtype.
            receive_sizes: elements from each rank.
            send_sizes: elements to each rank.
        """
        # gloo writes into a non-contiguous output in storage order without an error.
        assert received.is_contiguous() and sent.is_contiguous()
        if self.size == 1:
            received.copy_(sent)
            return
        dist.all_to_all_single(
            received, sent, list(receive_sizes), list(send_sizes), group=self.group
        )

    def exchange(
        self,
        *,
        send: torch.Tensor | None,
        to: int | None,
        receive: torch.Tensor | None,
        source: int | None,
        tag: int,
    ) -> "Exchange":
        """Start sending one tensor and receiving another; neither may be touched until `wait`.

        Empty tensors are sent too: the pattern of messages never depends on the mask.
        """
        if send is None or to is None:
            to = send = None
        if receive is None or source is None:
            source = receive = None
        some = send if send is not None else receive
        if some is None:
            return Exchange(())

        def post() -> list[dist.Work | None]:
            works = []
            if send is not None:
                works.append(dist.isend(send, group=self.group, group_dst=to, tag=tag))
            if receive is not None:
                works.append(dist.irecv(receive, group=self.group, group_src=source, tag=tag))
            return works

        # NCCL must see both in one group call, or two ranks that send first wait for each other.
        # `batch_isend_irecv` does the same but refuses groups that torch did not register.
        if self.group is not None and self.group._get_backend(some.device).supports_coalescing:
            coalescing = distributed_c10d._coalescing_manager
            with coalescing(self.group, some.device, async_ops=True) as manager:
                post()
            works = manager.works
        else:
            works = post()
        return Exchange(tuple(work for work in works if work is not None))

    def all_gather(self, local: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
        """Each rank's `local`, which differ in `size(0)` only, in rank order.

        Args:
            local: contiguous.
            sizes: `size(0)` on each rank.
        """
        if self.size == 1:
            return [local]
        # Collectives want equal shapes: travel padded, keep the real rows.
        padded = local.new_zeros((max(sizes), *local.shape[1:]))
        padded[: local.size(0)] = local
        gathered = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(gathered, padded, group=self.group)
        return [piece[:size] for piece, size in zip(gathered, sizes, strict=True)]


class Exchange:
    """An exchange in flight."""

    def __init__(self, works: tuple[dist.Work, ...]) -> None:
        self._works = works

    def wait(self) -> None:
        """Return when both messages are complete (on CUDA: on the current stream)."""
        for work in self._works:
            work.wait()


@dataclass(frozen=True)
class ContextParallelGroups:
    """The ring and the Ulysses group of this rank."""

    ring: Communicator
    ulysses: Communicator


def init_mesh(
    layout: Layout, mesh: DeviceMesh | None = None, *, device_type: str | None = None
) -> DeviceMesh:
    """The device mesh of a layout, axes "ring" and "ulysses" (outer first, as `order` says).

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
        LayoutError: the mesh lacks the "ring" and "ulysses" axes, or their sizes differ from the
            layout's degrees.
    """
    if isinstance(mesh, DeviceMesh):
        missing = [n for n in ("ring", "ulysses") if n not in (mesh.mesh_dim_names or ())]
        if missing:
            raise LayoutError(
                f"the mesh has axes {mesh.mesh_dim_names}, but attention needs "
                f'("ring", "ulysses"); make it with hybridcp.init_mesh(layout, mesh)'
            )
        groups = ContextParallelGroups(
            ring=Communicator(mesh.get_group("ring")),
            ulysses=Communicator(mesh.get_group("ulysses")),
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


def _axes(layout: Layout) -> tuple[tuple[str, str], tuple[int, int]]:
    if layout.order == "ulysses_inner":
        return ("ring", "ulysses"), (layout.ring_degree, layout.ulysses_degree)
    return ("ulysses", "ring"), (layout.ulysses_degree, layout.ring_degree)
