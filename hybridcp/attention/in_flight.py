"""Messages between ring positions that are under way, by the step in which they are due."""

from collections.abc import Sequence

import torch

from hybridcp.attention.kv_block import KVShape
from hybridcp.communicator import Exchange, Message, RingCommunicator
from hybridcp.steps import Transfer


class InFlight:
    """What this position has sent and waits for, in one pass.

    Args:
        ring: the ring group.
        shape: sizes of key/value blocks.
        tag: keeps blocks and gradients apart.
    """

    def __init__(self, ring: RingCommunicator, shape: KVShape, tag: int) -> None:
        self._ring = ring
        self._shape = shape
        self._tag = tag
        self._exchanges: dict[int, list[Exchange]] = {}
        self._arriving: dict[int, list[tuple[Transfer, torch.Tensor]]] = {}

    def start(
        self,
        sends: Sequence[tuple[Transfer, torch.Tensor]],
        receives: Sequence[Transfer],
        like: torch.Tensor,
    ) -> None:
        """Start the messages that begin in one step.

        Args:
            sends: each with the block that its rows are taken from; not to be changed before the
                message is due.
            receives: what begins to arrive, in the dtype and on the device of `like`.
            like: any tensor.
        """
        for due in sorted({transfer.due for transfer in (*(t for t, _ in sends), *receives)}):
            going: list[Message] = [
                (self._shape.take(block, transfer.rows), transfer.peer)
                for transfer, block in sends
                if transfer.due == due
            ]
            coming: list[Message] = []
            for transfer in receives:
                if transfer.due == due:
                    block = self._shape.empty(transfer.size, like)
                    coming.append((block, transfer.peer))
                    self._arriving.setdefault(due, []).append((transfer, block))
            exchange = self._ring.exchange(going, coming, tag=self._tag)
            self._exchanges.setdefault(due, []).append(exchange)

    def due(self, step: int) -> list[tuple[Transfer, torch.Tensor]]:
        """What has arrived for a step, in the order in which it was started; waits for it."""
        for exchange in self._exchanges.pop(step, ()):
            exchange.wait()
        return self._arriving.pop(step, [])
