"""Transfers between the ranks of one process group, or of two that make a double ring.

Everything takes an explicit group; the default process group is never used. Peers are ranks
within the group, so a group without global rank 0 works like any other.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

# Tags keep two exchanges between the same two ranks apart, whatever order they complete in.
KV_TAG = 0
GRADIENT_TAG = 1


Message = tuple[torch.Tensor, int]
"""A tensor and the rank at the other end."""


class Communicator:
    """Transfers within one process group.

    Args:
        group: the process group, or None for a group of one rank, which moves nothing.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.rank: int = group.rank() if group is not None else 0
        self.size: int = group.size() if group is not None else 1

    @property
    def process_groups(self) -> tuple[dist.ProcessGroup | None, ...]:
        """The process groups in use."""
        return (self.group,)

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
        self, sends: Sequence[Message], receives: Sequence[Message], *, tag: int
    ) -> "Exchange":
        """Start sending and receiving tensors; none may be touched until `wait`.

        Args:
            sends: (tensor, rank that gets it), contiguous.
            receives: (tensor to be filled, rank that sends it), contiguous.
            tag: keeps apart two exchanges between the same ranks.
        """
        some = next((tensor for tensor, _ in (*sends, *receives)), None)
        if some is None:
            return Exchange(())

        def post() -> list[dist.Work | None]:
            sent = [
                dist.isend(tensor, group=self.group, group_dst=to, tag=tag) for tensor, to in sends
            ]
            return sent + [
                dist.irecv(tensor, group=self.group, group_src=source, tag=tag)
                for tensor, source in receives
            ]

        # NCCL must see all in one group call, or two ranks that send first wait for each other.
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

    def all_reduce(
        self, tensor: torch.Tensor, op: "dist.ReduceOp.RedOpType" = dist.ReduceOp.SUM
    ) -> None:
        """Replace a contiguous tensor by the sum over all ranks, or another reduction."""
        if self.size > 1:
            dist.all_reduce(tensor, op=op, group=self.group)


class Exchange:
    """An exchange in flight."""

    def __init__(self, works: tuple[dist.Work, ...]) -> None:
        self.works = works

    def wait(self) -> None:
        """Return when all messages are complete (on CUDA: on the current stream)."""
        for work in self.works:
            work.wait()


class DoubleRing:
    """R ring positions as inner rings of w: rank = outer.rank · w + inner.rank.

    Each level has its own process group, so on NCCL a slow hop between inner rings does not hold
    up those within.

    Args:
        outer: the ranks that have the same place in every inner ring.
        inner: the ranks of one inner ring.
    """

    def __init__(self, outer: Communicator, inner: Communicator) -> None:
        self.outer = outer
        self.inner = inner
        self.rank = outer.rank * inner.size + inner.rank
        self.size = outer.size * inner.size

    @property
    def process_groups(self) -> tuple[dist.ProcessGroup | None, ...]:
        """The process groups in use."""
        return (self.outer.group, self.inner.group)

    def exchange(
        self, sends: Sequence[Message], receives: Sequence[Message], *, tag: int
    ) -> "Exchange":
        """As `Communicator.exchange`; every peer is in the own inner or outer ring."""
        works: list[dist.Work] = []
        for level in (self.outer, self.inner):
            going, coming = self._of_level(level, sends), self._of_level(level, receives)
            works += level.exchange(going, coming, tag=tag).works
        return Exchange(tuple(works))

    def all_gather(self, local: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
        """As `Communicator.all_gather`."""
        width = self.inner.size
        mine = self.outer.rank * width
        of_inner = torch.cat(self.inner.all_gather(local, sizes[mine : mine + width]))
        totals = [sum(sizes[o * width : (o + 1) * width]) for o in range(self.outer.size)]
        gathered = torch.cat(self.outer.all_gather(of_inner, totals))
        return list(gathered.split(list(sizes)))

    def all_reduce(
        self, tensor: torch.Tensor, op: "dist.ReduceOp.RedOpType" = dist.ReduceOp.SUM
    ) -> None:
        """As `Communicator.all_reduce`."""
        self.inner.all_reduce(tensor, op)
        self.outer.all_reduce(tensor, op)

    def _of_level(self, level: Communicator, messages: Sequence[Message]) -> list[Message]:
        found = []
        for tensor, peer in messages:
            outer, inner = divmod(peer, self.inner.size)
            if level is self.inner and outer == self.outer.rank:
                found.append((tensor, inner))
            elif level is self.outer and inner == self.inner.rank:
                found.append((tensor, outer))
        return found


RingCommunicator = Communicator | DoubleRing
