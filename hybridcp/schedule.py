"""The schedule: for each ring position, which block is present when, and what is computed.

Mask × sharding becomes an explicit list of steps, in local row numbers. Checking, pricing,
drawing and running a layout all read these same steps.

Ring exchange, R ring positions, forward: at step t position r holds the keys and values of
position (r - t) mod R, received from r - 1; while it computes, it passes that block on to r + 1.
R - 1 hops. Backward: blocks move the other way and begin with the block that arrived last, so at
step t position r holds those of (r + 1 + t) mod R: R - 2 hops of keys and values, then its own
block from memory; the gradient of a block follows it, R - 1 hops.
(Ring Attention, arXiv 2310.01889, section 3; the reversed start is this project's.)
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from hybridcp.masks import UNBOUNDED, AttentionMask, Band
from hybridcp.sharding import Sharding, TokenRange


@dataclass(frozen=True, slots=True)
class Step:
    """One step of one ring position.

    Attributes:
        kv_owner: ring position whose keys and values are present.
        bands: what to compute: trimmed, disjoint; queries are local rows of this position, keys
            local rows of the owner's block. Empty: nothing to compute, the block is passed on.
        send_to: ring position that receives the present block during this step, or None.
        receive_from: ring position whose present block arrives for the next step, or None.
    """

    kv_owner: int
    bands: tuple[Band, ...]
    send_to: int | None
    receive_from: int | None


class Schedule:
    """All steps of a mask over a sharding; steps of one ring position are built on demand.

        schedule = Schedule(Layout(ulysses_degree=2, ring_degree=4).shard(65536), causal())
        schedule.forward_steps(ring_rank=3)

    Args:
        sharding: who holds which tokens.
        mask: allowed pairs.

    Attributes:
        bands: the mask's bands in global positions, cut to the sequence.

    Raises:
        MaskError: the mask does not fit the sequence length.
    """

    def __init__(self, sharding: Sharding, mask: AttentionMask) -> None:
        self.sharding = sharding
        self.mask = mask
        self.bands = mask.bands_for(sharding.seq_len, sharding.seq_len)

    @property
    def ring_degree(self) -> int:
        """R, number of ring positions and of steps."""
        return self.sharding.ring_degree

    def forward_steps(self, ring_rank: int) -> tuple[Step, ...]:
        """The R steps of one ring position in the forward pass, in order."""
        degree = self.ring_degree
        owners = [(ring_rank - t) % degree for t in range(degree)]
        return self._steps(ring_rank, owners, hops=degree - 1, direction=1)

    def backward_steps(self, ring_rank: int) -> tuple[Step, ...]:
        """The R steps of one ring position in the backward pass, in order.

        Transfers are those of keys and values. The gradient of the block at step t < R - 1 goes
        to position ring_rank - 1 after the step.
        """
        degree = self.ring_degree
        owners = [(ring_rank + 1 + t) % degree for t in range(degree)]
        return self._steps(ring_rank, owners, hops=degree - 2, direction=-1)

    def bands_between(self, ring_rank: int) -> dict[int, tuple[Band, ...]]:
        """For one ring position as query side: key/value owner → its bands in local rows.

        Owners that the mask never pairs with this position are left out.
        """
        found: dict[int, list[Band]] = {}
        for queries, q_row in self.sharding.local_rows(ring_rank):
            for whole in self.mask_bands_at(*queries):
                band = whole.intersect(Band(*queries, 0, self.sharding.seq_len))
                if band is None:
                    continue
                for keys, k_row, owner in self._key_index.meeting(band.k0, band.k1):
                    piece = band.intersect(Band(*queries, *keys))
                    if piece is not None:
                        local = piece.shifted(q_row - queries.start, k_row - keys.start)
                        found.setdefault(owner, []).append(local)
        return {owner: merge_bands(bands) for owner, bands in found.items()}

    def mask_bands_at(self, q0: int, q1: int) -> list[Band]:
        """Global bands of the mask that meet queries `[q0, q1)`."""
        return list(self._mask_index.meeting_rows(TokenRange(q0, q1)))

    def _steps(
        self, ring_rank: int, owners: list[int], hops: int, direction: int
    ) -> tuple[Step, ...]:
        bands = self.bands_between(ring_rank)
        ahead = (ring_rank + direction) % self.ring_degree
        behind = (ring_rank - direction) % self.ring_degree
        return tuple(
            Step(
                kv_owner=owner,
                bands=bands.get(owner, ()),
                send_to=ahead if t < hops else None,
                receive_from=behind if t < hops else None,
            )
            for t, owner in enumerate(owners)
        )

    @cached_property
    def _mask_index(self) -> "_RowIndex":
        return _RowIndex(self.bands)

    @cached_property
    def _key_index(self) -> "_KeyIndex":
        return _KeyIndex(self.sharding)


def merge_bands(bands: list[Band]) -> tuple[Band, ...]:
    """The same pairs as fewer bands where neighbours in local memory form one.

    `bands` are trimmed and disjoint. Zigzag causal work becomes one band a step: one kernel
    call instead of three.
    """
    merged = sorted(bands)
    while True:
        before = len(merged)
        for along_keys in (True, False):
            merged = _merge_neighbours(merged, along_keys)
        if len(merged) == before:
            return tuple(merged)


def _merge_neighbours(bands: list[Band], along_keys: bool) -> list[Band]:
    def start(band: Band) -> int:
        return band.k0 if along_keys else band.q0

    # In this order a band is met before any that begins where it ends.
    waiting: dict[int, list[Band]] = {}
    for band in sorted(bands, key=start):
        waiting.setdefault(start(band), []).append(band)
    result: list[Band] = []
    for position in list(waiting):
        while waiting[position]:
            union = waiting[position].pop()
            while True:
                neighbours = waiting.get(union.k1 if along_keys else union.q1, [])
                joined = next(((n, u) for n in neighbours if (u := _union(union, n))), None)
                if joined is None:
                    break
                neighbours.remove(joined[0])
                union = joined[1]
            result.append(union)
    return sorted(result)


def _union(a: Band, b: Band) -> Band | None:
    """One band with exactly the pairs of two disjoint bands, if there is one."""
    total = a.pairs + b.pairs
    hull = (min(a.q0, b.q0), max(a.q1, b.q1), min(a.k0, b.k0), max(a.k1, b.k1))
    for lo in {a.lo, b.lo, -UNBOUNDED}:
        for hi in {a.hi, b.hi, UNBOUNDED}:
            hull_band = Band(*hull, lo, hi)
            holds_both = hull_band.intersect(a) == a and hull_band.intersect(b) == b
            if hull_band.pairs == total and holds_both:
                return hull_band.trimmed()
    return None


class _RowIndex:
    """Bands of a mask by query rows."""

    def __init__(self, bands: tuple[Band, ...]) -> None:
        self._bands = bands
        self._starts = [band.q0 for band in bands]
        # Bands are sorted by start; the running maximum of ends is sorted too.
        self._ends = list(accumulate((band.q1 for band in bands), max))

    def meeting_rows(self, rows: TokenRange) -> Iterator[Band]:
        first = bisect_right(self._ends, rows.start)
        last = bisect_left(self._starts, rows.stop)
        return (band for band in self._bands[first:last] if band.q1 > rows.start)


class _KeyIndex:
    """Every ring position's key ranges by global position, with local row and owner."""

    def __init__(self, sharding: Sharding) -> None:
        self._entries = sorted(
            (piece, row, owner)
            for owner in range(sharding.ring_degree)
            for piece, row in sharding.local_rows(owner)
        )
        self._stops = [piece.stop for piece, _, _ in self._entries]
        self._starts = [piece.start for piece, _, _ in self._entries]

    def meeting(self, start: int, stop: int) -> list[tuple[TokenRange, int, int]]:
        first = bisect_right(self._stops, start)
        last = bisect_left(self._starts, stop)
        return self._entries[first:last]
