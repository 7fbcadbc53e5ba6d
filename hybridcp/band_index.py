"""Finding bands by their rows, and key ranges by position, without looking at all of them."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate

from hybridcp.masks import Band
from hybridcp.sharding import Sharding, TokenRange


class BandsByRow:
    """Bands, found by query rows.

    Args:
        bands: sorted by `q0`.
    """

    def __init__(self, bands: Sequence[Band]) -> None:
        self._bands = bands
        self._starts = [band.q0 for band in bands]
        # Starts ascend; the running maximum of ends does too.
        self._ends = list(accumulate((band.q1 for band in bands), max))

    def meeting(self, q0: int, q1: int) -> list[Band]:
        """The bands that have a query in `[q0, q1)`."""
        first = bisect_right(self._ends, q0)
        last = bisect_left(self._starts, q1)
        return [band for band in self._bands[first:last] if band.q1 > q0]


class HeldRanges:
    """Every ring position's ranges, found by global position."""

    def __init__(self, sharding: Sharding) -> None:
        self._held = sorted(
            (piece, row, owner)
            for owner in range(sharding.ring_degree)
            for piece, row in sharding.local_rows(owner)
        )
        self._starts = [piece.start for piece, _, _ in self._held]
        self._stops = [piece.stop for piece, _, _ in self._held]

    def meeting(self, start: int, stop: int) -> list[tuple[TokenRange, int, int]]:
        """(range, first local row, owner) of each range that meets `[start, stop)`."""
        first = bisect_right(self._stops, start)
        last = bisect_left(self._starts, stop)
        return self._held[first:last]
