"""What a schedule is made of: steps, and the messages that begin in each.

A block is the keys and values of one ring position, or the rows of it that are needed.
"""

from collections.abc import Iterable
from typing import NamedTuple

from hybridcp.band_merging import merge_bands
from hybridcp.bands import Band
from hybridcp.sharding import TokenRange

Rows = tuple[TokenRange, ...]
"""Local rows of one ring position: ascending ranges that do not touch."""


class Transfer(NamedTuple):
    """One message between two ring positions.

    Attributes:
        peer: the position at the other end.
        owner: the position whose keys and values (or their gradient) travel.
        rows: which local rows of the owner.
        due: step, of the position that receives, in which they are used; later than the step in
            which the message begins.
    """

    peer: int
    owner: int
    rows: Rows
    due: int

    @property
    def size(self) -> int:
        """Number of rows."""
        return size_of(self.rows)


class Step(NamedTuple):
    """One step of one ring position.

    What is present is this position's own block, or what a message brought that was due.

    Attributes:
        kv_owner: ring position whose keys and values are present; None for those of all positions,
            gathered into global order.
        kv_rows: the owner's local rows that are present, packed one after the other.
        bands: what to compute: trimmed, disjoint; queries are local rows of this position, keys
            rows of the present block. Empty: nothing to compute.
        sends: what leaves as this step begins: the present block, or rows of the own.
        receives: what begins to arrive then.
        gradient_sends: in the backward, what leaves after this step: the gradient of the present
            block, once what was due has been added.
        gradient_receives: what begins to arrive then.
    """

    kv_owner: int | None
    kv_rows: Rows
    bands: tuple[Band, ...]
    sends: tuple[Transfer, ...] = ()
    receives: tuple[Transfer, ...] = ()
    gradient_sends: tuple[Transfer, ...] = ()
    gradient_receives: tuple[Transfer, ...] = ()


def size_of(rows: Rows) -> int:
    """Number of rows."""
    return sum(piece.size for piece in rows)


def rows_of(spans: Iterable[tuple[int, int]]) -> Rows:
    """The rows of all spans, which may overlap, as ascending ranges that do not touch."""
    found: list[TokenRange] = []
    for start, stop in sorted(spans):
        if found and start <= found[-1].stop:
            found[-1] = TokenRange(found[-1].start, max(stop, found[-1].stop))
        else:
            found.append(TokenRange(start, stop))
    return tuple(found)


def packed(bands: tuple[Band, ...], rows: Rows) -> tuple[Band, ...]:
    """Bands whose keys are some rows of a block, renumbered for a block of these rows alone."""
    if len(rows) == 1:
        return tuple(band.shifted(0, -rows[0].start) for band in bands) if rows[0].start else bands
    found = []
    offset = 0
    for piece in rows:
        inside = Band(0, max((b.q1 for b in bands), default=0), *piece)
        for band in bands:
            part = band.intersect(inside)
            if part is not None:
                found.append(part.shifted(0, offset - piece.start))
        offset += piece.size
    return merge_bands(found)
