"""Steps of the ring exchange, single or double: whole blocks go from position to position.

One ring of R positions, forward: at step t position r holds the block of (r - t) mod R, received
from r - 1; while it computes, it passes that block on to r + 1. R - 1 hops. Backward: blocks move
the other way and begin with the block that arrived last, so at step t position r holds that of
(r + 1 + t) mod R: R - 2 hops of keys and values, then its own block from memory; the gradient of a
block follows it, R - 1 hops. (Ring Attention, arXiv 2310.01889, section 3; the reversed start is
this project's.)

Double ring: position r = o · w + i is number i of the inner ring o, w positions to an inner ring,
m = R / w of them. Blocks go once around the inner ring in each of m cycles; the hop to the next
inner ring is posted when a cycle begins and due when the next does, so a slow link has a whole
cycle. (Double-Ring-Attention of LoongTrain, arXiv 2406.18485, section 4.2.) The backward mirrors
it: the gradients of a cycle are summed around the inner ring, and only the sum goes to the next.
Its last cycle has the blocks of the own inner ring, so these come from next door, not around the
outer ring. Hops and sums are as many as in one ring, which is the double ring of w = R.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from hybridcp.bands import Band
from hybridcp.steps import Rows, Step, Transfer

NO_TRANSFER: tuple[Transfer, ...] = ()


@dataclass(frozen=True)
class Ring:
    """The steps of one exchange around R positions.

    Attributes:
        inner: w, positions of one inner ring; R for one ring. Divides R.
        blocks: all local rows of each of the R positions.
    """

    inner: int
    blocks: tuple[Rows, ...]

    @cached_property
    def degree(self) -> int:
        """R."""
        return len(self.blocks)

    def forward(self, position: int, bands: Mapping[int, tuple[Band, ...]]) -> tuple[Step, ...]:
        """The R steps of one position; `bands` by owner."""
        outer, inner = divmod(position, self.inner)
        ahead, behind = self._at(outer, inner + 1), self._at(outer, inner - 1)
        ahead_outside, behind_outside = self._at(outer + 1, inner), self._at(outer - 1, inner)
        steps = []
        for t in range(self.degree):
            c, s = divmod(t, self.inner)
            owner = self._at(outer - c, inner - s)
            sends = receives = NO_TRANSFER
            if s + 1 < self.inner:
                sends = self._hop(owner, ahead, t + 1)
                receives = self._hop(self._at(outer - c, inner - 1 - s), behind, t + 1)
            due = t + self.inner
            if s == 0 and due < self.degree:
                sends += self._hop(owner, ahead_outside, due)
                receives += self._hop(self._at(outer - 1 - c, inner), behind_outside, due)
            steps.append(Step(owner, self.blocks[owner], bands.get(owner, ()), sends, receives))
        return tuple(steps)

    def backward(self, position: int, bands: Mapping[int, tuple[Band, ...]]) -> tuple[Step, ...]:
        """The R steps of one position; `bands` by owner."""
        outer, inner = divmod(position, self.inner)
        ahead, behind = self._at(outer, inner - 1), self._at(outer, inner + 1)
        ahead_outside, behind_outside = self._at(outer - 1, inner), self._at(outer + 1, inner)
        cycles = self.degree // self.inner
        steps = []
        for t in range(self.degree):
            c, s = divmod(t, self.inner)
            owner = self._at(outer + 1 + c, inner + 1 + s)
            follows = self._at(outer + 1 + c, inner + 2 + s)
            sends = receives = gradient_sends = gradient_receives = NO_TRANSFER
            is_last_cycle = c + 1 == cycles
            # In the last cycle the last block is the own.
            if s + 1 < self.inner - is_last_cycle:
                sends = self._hop(owner, ahead, t + 1)
                receives = self._hop(follows, behind, t + 1)
            elif s + 1 == self.inner and c + 2 == cycles:
                sends = self._hop(position, ahead, t + 1)
                receives = self._hop(behind, behind, t + 1)
            due = t + self.inner
            if s == 0 and c + 2 < cycles:
                sends += self._hop(owner, ahead_outside, due)
                receives += self._hop(self._at(outer + 2 + c, inner + 1), behind_outside, due)
            if s + 1 < self.inner:
                gradient_sends = self._hop(owner, ahead, t + 1)
                gradient_receives = self._hop(follows, behind, t + 1)
            elif not is_last_cycle:
                gradient_sends = self._hop(owner, ahead_outside, due)
                gradient_receives = self._hop(self._at(outer + 2 + c, inner), behind_outside, due)
            steps.append(
                Step(
                    owner,
                    self.blocks[owner],
                    bands.get(owner, ()),
                    sends,
                    receives,
                    gradient_sends,
                    gradient_receives,
                )
            )
        return tuple(steps)

    def _at(self, outer: int, inner: int) -> int:
        """The position of these coordinates, which go around."""
        return outer * self.inner % self.degree + inner % self.inner

    def _hop(self, owner: int, peer: int, due: int) -> tuple[Transfer, ...]:
        """One message, or none if the owner has no rows."""
        rows = self.blocks[owner]
        return (Transfer(peer, owner, rows, due),) if rows else NO_TRANSFER
