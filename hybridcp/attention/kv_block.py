"""Keys and values of some rows as one flat tensor: one message, whatever their head dims.

A block holds all its keys, (B, rows, n, D), then all its values, (B, rows, n, Dv). Its gradient
has the same form.
"""

from dataclasses import dataclass

import torch

from hybridcp.steps import Rows, size_of


@dataclass(frozen=True, slots=True)
class KVShape:
    """Sizes of a block but for its rows.

    Attributes:
        batch: B.
        heads: n, key/value heads of this rank.
        head_dim: D of the keys.
        value_dim: Dv of the values.
    """

    batch: int
    heads: int
    head_dim: int
    value_dim: int

    def empty(self, rows: int, like: torch.Tensor) -> torch.Tensor:
        """An uninitialised block of that many rows, of the dtype and device of `like`."""
        return like.new_empty(self.elements(rows))

    def elements(self, rows: int) -> int:
        """Numbers in a block of that many rows."""
        return rows * self._row_size

    def views(self, block: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys (B, rows, n, D) and values (B, rows, n, Dv), sharing the block's memory."""
        rows = block.numel() // self._row_size
        keys = rows * self.batch * self.heads * self.head_dim
        return (
            block[:keys].view(self.batch, rows, self.heads, self.head_dim),
            block[keys:].view(self.batch, rows, self.heads, self.value_dim),
        )

    def take(self, block: torch.Tensor, rows: Rows) -> torch.Tensor:
        """A block of some rows of this one; the block itself if it is all of them."""
        if size_of(rows) * self._row_size == block.numel():
            return block
        if not rows:
            return self.empty(0, block)
        taken = self.empty(size_of(rows), block)
        for whole, part in zip(self.views(block), self.views(taken), strict=True):
            torch.cat([whole[:, a:b] for a, b in rows], dim=1, out=part)
        return taken

    def put(self, block: torch.Tensor, rows: Rows, part: torch.Tensor) -> None:
        """Write a block of some rows into this one."""
        for whole, pieces in zip(self.views(block), self.views(part), strict=True):
            offset = 0
            for a, b in rows:
                whole[:, a:b] = pieces[:, offset : offset + b - a]
                offset += b - a

    def add(self, block: torch.Tensor, rows: Rows, part: torch.Tensor) -> None:
        """Add a block of some rows into this one, in place."""
        for whole, pieces in zip(self.views(block), self.views(part), strict=True):
            offset = 0
            for a, b in rows:
                whole[:, a:b] += pieces[:, offset : offset + b - a]
                offset += b - a

    @property
    def _row_size(self) -> int:
        return self.batch * self.heads * (self.head_dim + self.value_dim)
