"""Bands: rectangles of (query, key) positions cut by two diagonals, and their algebra.

Bands are closed under intersection, their pairs are counted in closed form, and a trimmed band
is one flash-attention call. `hybridcp.masks` builds every mask from them.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

UNBOUNDED = 1 << 62
"""Stands for an open end; far above any position, so plain integer arithmetic stays exact."""


class Band(NamedTuple):
    """The pairs with `q0 <= q < q1`, `k0 <= k < k1` and `lo <= k - q <= hi`.

    `q1`, `k1` and `hi` may be `UNBOUNDED`, `lo` may be `-UNBOUNDED`.
    """

    q0: int
    q1: int
    k0: int
    k1: int
    lo: int = -UNBOUNDED
    hi: int = UNBOUNDED

    @property
    def q_len(self) -> int:
        """Number of query rows."""
        return self.q1 - self.q0

    @property
    def k_len(self) -> int:
        """Number of key columns."""
        return self.k1 - self.k0

    @property
    def has_lo(self) -> bool:
        """Whether `lo` is a bound."""
        return self.lo > -UNBOUNDED

    @property
    def has_hi(self) -> bool:
        """Whether `hi` is a bound."""
        return self.hi < UNBOUNDED

    @property
    def pairs(self) -> int:
        """Number of (query, key) pairs: two clipped arithmetic sums, no loop."""
        if self.q0 >= self.q1 or self.k0 >= self.k1 or self.lo > self.hi:
            return 0
        if self.lo == -UNBOUNDED and self.hi == UNBOUNDED:
            return self.q_len * self.k_len
        below_hi = self._pairs_at_or_below(self.hi) if self.has_hi else self.q_len * self.k_len
        return below_hi - (self._pairs_at_or_below(self.lo - 1) if self.has_lo else 0)

    def _pairs_at_or_below(self, diagonal: int) -> int:
        """Pairs of the rectangle with `k - q <= diagonal`."""
        # Row q holds clip(q + first, 0, k_len) keys: nothing, then a ramp, then all.
        first = diagonal + 1 - self.k0
        ramp_start = min(max(self.q0, -first), self.q1)
        ramp_end = min(max(self.q0, self.k_len - first), self.q1)
        ramp_rows = ramp_end - ramp_start
        ramp = ramp_rows * (ramp_start + ramp_end - 1 + 2 * first) // 2
        return ramp + (self.q1 - ramp_end) * self.k_len

    @property
    def flash_window(self) -> tuple[int, int]:
        """`window_size=(left, right)` of a trimmed band in flash-attn's convention.

        flash-attn aligns windows to the bottom-right corner of (q_len, k_len) and writes -1 for
        an open side (flash_attn_interface.py, `flash_attn_func`). A side that reaches over all
        keys is read differently by its kernels; `hybridcp.kernels.varlen` cuts such bands.
        """
        corner = self.k_len - self.q_len
        offset = self.k0 - self.q0
        left = corner - (self.lo - offset) if self.has_lo else -1
        right = (self.hi - offset) - corner if self.has_hi else -1
        return left, right

    def keys_of(self, q: int) -> range:
        """The keys that query `q` sees in this band."""
        if not self.q0 <= q < self.q1:
            return range(0)
        return range(max(self.k0, q + self.lo), max(min(self.k1, q + self.hi + 1), 0))

    def trimmed(self) -> "Band | None":
        """The one canonical form: every row has a key, every column a query; None if empty.

        A diagonal that no longer cuts becomes unbounded.
        """
        if self.lo == -UNBOUNDED and self.hi == UNBOUNDED:
            return self if self.q0 < self.q1 and self.k0 < self.k1 else None
        q0 = max(self.q0, self.k0 - self.hi)
        q1 = min(self.q1, self.k1 - self.lo)
        k0 = max(self.k0, q0 + self.lo)
        k1 = min(self.k1, q1 + self.hi)
        if q0 >= q1 or k0 >= k1 or self.lo > self.hi:
            return None
        lo = self.lo if self.lo > k0 - (q1 - 1) else -UNBOUNDED
        hi = self.hi if self.hi < (k1 - 1) - q0 else UNBOUNDED
        return Band(q0, q1, k0, k1, lo, hi)

    def intersect(self, other: "Band") -> "Band | None":
        """The trimmed band of the pairs in both, or None."""
        return Band(
            max(self.q0, other.q0),
            min(self.q1, other.q1),
            max(self.k0, other.k0),
            min(self.k1, other.k1),
            max(self.lo, other.lo),
            min(self.hi, other.hi),
        ).trimmed()

    def holds(self, other: "Band") -> bool:
        """Whether every pair of a trimmed band is in this one."""
        return (
            self.q0 <= other.q0
            and other.q1 <= self.q1
            and self.k0 <= other.k0
            and other.k1 <= self.k1
            and self.lo <= max(other.lo, other.k0 - other.q1 + 1)
            and min(other.hi, other.k1 - 1 - other.q0) <= self.hi
        )

    def shifted(self, q_by: int, k_by: int) -> "Band":
        """The same band with queries renumbered by `q_by` and keys by `k_by`."""
        turn = k_by - q_by
        return Band(
            self.q0 + q_by,
            self.q1 + q_by,
            self.k0 + k_by,
            self.k1 + k_by,
            self.lo + turn if self.has_lo else self.lo,
            self.hi + turn if self.has_hi else self.hi,
        )


def first_overlap(bands: Sequence[Band]) -> tuple[Band, Band] | None:
    """Two bands that share a (query, key) pair, or None if all are disjoint; sorted bands."""
    opened: list[Band] = []
    for band in bands:
        opened = [other for other in opened if other.q1 > band.q0]
        for other in opened:
            if band.intersect(other) is not None:
                return other, band
        opened.append(band)
    return None


def meeting_rows(left: Iterable[Band], right: Iterable[Band]) -> Iterator[tuple[Band, Band]]:
    """Pairs of one band of each side whose query ranges meet; both sides sorted by `q0`."""
    left, right = list(left), list(right)
    open_left: list[Band] = []
    open_right: list[Band] = []
    i = j = 0
    while i < len(left) or j < len(right):
        take_left = j == len(right) or (i < len(left) and left[i].q0 <= right[j].q0)
        band = left[i] if take_left else right[j]
        others = open_right if take_left else open_left
        others[:] = [other for other in others if other.q1 > band.q0]
        for other in others:
            yield (band, other) if take_left else (other, band)
        if take_left:
            open_left.append(band)
            i += 1
        else:
            open_right.append(band)
            j += 1
