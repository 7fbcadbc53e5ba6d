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

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from hybridcp.bands import Band
from hybridcp.steps import Rows, Step, Transfer, some


@dataclass(frozen=True, slots=True)
class Ring:
    """The steps of one exchange around R positions.

    Attributes:
        degree: R.
        inner: w, positions of one inner ring; R for one ring. Divides R.
        whole: all local rows of a position.
    """

    degree: int
    inner: int
    whole: Callable[[int], Rows]

    def forward(self, position: int, bands: Mapping[int, tuple[Band, ...]]) -> tuple[Step, ...]:
        """The R steps of one position; `bands` by owner."""
        outer, inner = divmod(position, self.inner)
        cycles = self.degree // self.inner
        steps = []
        for t in range(self.degree):
            c, s = divmod(t, self.inner)
            owner = self._at(outer - c, inner - s)
            sends: list[Transfer] = []
            receives: list[Transfer] = []
            if s + 1 < self.inner:
                before = self._at(outer, inner - 1)
                sends.append(self._block(owner, to=self._at(outer, inner + 1), due=t + 1))
                receives.append(
                    self._block(self._at(outer - c, inner - 1 - s), to=before, due=t + 1)
                )
            if s == 0 and c + 1 < cycles:
                due = t + self.inner
                sends.append(self._block(owner, to=self._at(outer + 1, inner), due=due))
                receives.append(
                    self._block(
                        self._at(outer - 1 - c, inner), to=self._at(outer - 1, inner), due=due
                    )
                )
            steps.append(
                Step(owner, self.whole(owner), bands.get(owner, ()), some(*sends), some(*receives))
            )
        return tuple(steps)

    def backward(self, position: int, bands: Mapping[int, tuple[Band, ...]]) -> tuple[Step, ...]:
        """The R steps of one position; `bands` by owner."""
        outer, inner = divmod(position, self.inner)
        cycles = self.degree // self.inner
        # Everything comes from `after` in the own inner ring or `beyond` in the next.
        ahead, after = self._at(outer, inner - 1), self._at(outer, inner + 1)
        beyond = self._at(outer + 1, inner)
        steps = []
        for t in range(self.degree):
            c, s = divmod(t, self.inner)
            owner = self._at(outer + 1 + c, inner + 1 + s)
            follows = self._at(outer + 1 + c, inner + 2 + s)
            sends: list[Transfer] = []
            receives: list[Transfer] = []
            is_last_cycle = c + 1 == cycles
            # In the last cycle the last block is the own.
            if s + 1 < self.inner - is_last_cycle:
                sends.append(self._block(owner, to=ahead, due=t + 1))
                receives.append(self._block(follows, to=after, due=t + 1))
            if s == 0 and c + 2 < cycles:
                due = t + self.inner
                sends.append(self._block(owner, to=self._at(outer - 1, inner), due=due))
                receives.append(self._block(self._at(outer + 2 + c, inner + 1), to=beyond, due=due))
            if s + 1 == self.inner and c + 2 == cycles:
                sends.append(self._block(position, to=ahead, due=t + 1))
                receives.append(self._block(after, to=after, due=t + 1))
            gradient_sends: list[Transfer] = []
            gradient_receives: list[Transfer] = []
            if s + 1 < self.inner:
                gradient_sends.append(self._block(owner, to=ahead, due=t + 1))
                gradient_receives.append(self._block(follows, to=after, due=t + 1))
            elif not is_last_cycle:
                due = t + self.inner
                gradient_sends.append(self._block(owner, to=self._at(outer - 1, inner), due=due))
                gradient_receives.append(
                    self._block(self._at(outer + 2 + c, inner), to=beyond, due=due)
                )
            steps.append(
                Step(
                    owner,
                    self.whole(owner),
                    bands.get(owner, ()),
                    some(*sends),
                    some(*receives),
                    some(*gradient_sends),
                    some(*gradient_receives),
                )
            )
        return tuple(steps)

    def _at(self, outer: int, inner: int) -> int:
        """The position of these coordinates, which go around."""
        return outer * self.inner % self.degree + inner % self.inner

    def _block(self, owner: int, *, to: int, due: int) -> Transfer:
        return Transfer(to, owner, self.whole(owner), due)
