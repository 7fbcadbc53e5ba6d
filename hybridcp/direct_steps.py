"""Steps of the direct exchange: each position gets from each other only the rows that it sees.

At distance d position r receives from r - d the rows that its queries see, and sends r + d those
that it sees; positions with nothing in common exchange nothing. A sliding window costs a halo,
packed documents only what crosses a shard's edge. Backward: distances in reverse, beginning with
the rows that arrived last; the gradient of rows goes straight back to their owner.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from hybridcp.bands import Band
from hybridcp.steps import Rows, Step, Transfer


@dataclass(frozen=True, slots=True)
class Needs:
    """What one position needs of others, and they of it.

    Attributes:
        position: ring position.
        degree: R.
        rows: which rows of each owner its queries see; of the own block, all.
        bands: what they see, with keys numbered in a block of these rows.
        seen: own rows that the queries of each other position see.
    """

    position: int
    degree: int
    rows: Mapping[int, Rows]
    bands: Mapping[int, tuple[Band, ...]]
    seen: Mapping[int, Rows]

    def forward(self) -> tuple[Step, ...]:
        """The R steps of the forward pass."""
        steps = []
        for t in range(self.degree):
            to = (self.position + t + 1) % self.degree
            source = (self.position - t - 1) % self.degree
            travels = t + 1 < self.degree
            steps.append(
                self._step(
                    (self.position - t) % self.degree,
                    sends=self._own(to, t + 1) if travels else (),
                    receives=self._of(source, t + 1) if travels else (),
                )
            )
        return tuple(steps)

    def backward(self) -> tuple[Step, ...]:
        """The R steps of the backward pass."""
        steps = []
        for t in range(self.degree):
            distance = self.degree - 1 - t
            owner = (self.position - distance) % self.degree
            # The block of distance d - 1 travels during the step of distance d; own needs none.
            to = (self.position + distance - 1) % self.degree
            source = (self.position - distance + 1) % self.degree
            travels = distance > 1
            back_from = (self.position + distance) % self.degree
            steps.append(
                self._step(
                    owner,
                    sends=self._own(to, t + 1) if travels else (),
                    receives=self._of(source, t + 1) if travels else (),
                    gradient_sends=self._of(owner, t + 1) if distance else (),
                    gradient_receives=self._own(back_from, t + 1) if distance else (),
                )
            )
        return tuple(steps)

    def _step(self, owner: int, **transfers: tuple[Transfer, ...]) -> Step:
        return Step(owner, self.rows.get(owner, ()), self.bands.get(owner, ()), **transfers)

    def _own(self, peer: int, due: int) -> tuple[Transfer, ...]:
        rows = self.seen.get(peer)
        return (Transfer(peer, self.position, rows, due),) if rows else ()

    def _of(self, owner: int, due: int) -> tuple[Transfer, ...]:
        rows = self.rows.get(owner)
        return (Transfer(owner, owner, rows, due),) if rows else ()
