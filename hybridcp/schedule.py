"""The schedule: for each ring position, which block is present when, and what is computed.

Mask × sharding becomes an explicit list of steps, in local row numbers. Checking, pricing,
drawing and running a layout all read these same steps. How keys and values get to the queries:

`ring`: whole blocks go from position to position, around one ring or two (`hybridcp.rings`).
`direct`: each position gets only the rows that it sees (`hybridcp.direct_steps`).
`allgather`: one step, in which the blocks of all positions are gathered into global order; in the
backward they are gathered again, and their gradients go back to the owners to be summed there.
"""

from collections.abc import Iterator
from functools import cached_property
from typing import Self

from hybridcp.band_index import BandsByRow, HeldRanges
from hybridcp.band_merging import merge_bands
from hybridcp.direct_steps import Needs
from hybridcp.layout import Exchange, Layout
from hybridcp.masks import AttentionMask, Band
from hybridcp.rings import Ring
from hybridcp.sharding import Sharding, TokenRange
from hybridcp.steps import Rows, Step, packed, rows_of


class Schedule:
    """All steps of a mask over a sharding; steps of one ring position are built on demand.

        schedule = Schedule(Layout(ulysses_degree=2, ring_degree=4).shard(65536), causal())
        schedule.forward_steps(ring_rank=3)

    Args:
        sharding: who holds which queries.
        mask: allowed pairs.
        exchange: how keys and values travel.
        inner_ring_size: w, positions of an inner ring in a double ring; None for one ring.
        kv_sharding: who holds which keys and values, if these are another sequence (cross
            attention); of as many ring positions and Ulysses ranks.

    Attributes:
        bands: the mask's bands in global positions, cut to the sequence.

    Raises:
        MaskError: the mask does not fit the sequence lengths.
    """

    def __init__(
        self,
        sharding: Sharding,
        mask: AttentionMask,
        exchange: Exchange = "ring",
        *,
        inner_ring_size: int | None = None,
        kv_sharding: Sharding | None = None,
    ) -> None:
        self.sharding = sharding
        self.kv_sharding = kv_sharding or sharding
        self.mask = mask
        self.exchange = exchange
        self.inner_ring_size = inner_ring_size
        self.bands = mask.bands_for(sharding.seq_len, self.kv_sharding.seq_len)
        # Both passes ask for the same, and most pairs of positions look alike in local rows.
        self._between: dict[int, dict[int, tuple[Band, ...]]] = {}
        self._needed: dict[int, Needs] = {}
        self._merged: dict[tuple[Band, ...], tuple[Band, ...]] = {}

    @classmethod
    def of_layout(
        cls,
        layout: Layout,
        sharding: Sharding,
        mask: AttentionMask,
        kv_sharding: Sharding | None = None,
    ) -> Self:
        """The schedule of a mask over a sharding, by the exchange that a layout names.

        Raises:
            MaskError: the mask does not fit the sequence lengths.
        """
        return cls(
            sharding,
            mask,
            layout.exchange,
            inner_ring_size=layout.inner_ring_size,
            kv_sharding=kv_sharding,
        )

    @property
    def ring_degree(self) -> int:
        """R, number of ring positions."""
        return self.sharding.ring_degree

    def forward_steps(self, ring_rank: int) -> tuple[Step, ...]:
        """The steps of one ring position in the forward pass, in order: R, or 1 of `allgather`."""
        if self.exchange == "allgather":
            return self._gathered(ring_rank)
        if self.exchange == "direct":
            return self._needs(ring_rank).forward()
        return self._ring.forward(ring_rank, self.bands_between(ring_rank))

    def backward_steps(self, ring_rank: int) -> tuple[Step, ...]:
        """The steps of one ring position in the backward pass, in order."""
        if self.exchange == "allgather":
            return self._gathered(ring_rank)
        if self.exchange == "direct":
            return self._needs(ring_rank).backward()
        return self._ring.backward(ring_rank, self.bands_between(ring_rank))

    def bands_between(self, ring_rank: int) -> dict[int, tuple[Band, ...]]:
        """For one ring position as query side: key/value owner → its bands in local rows.

        Owners that the mask never pairs with this position are left out.
        """
        if ring_rank not in self._between:
            found: dict[int, list[Band]] = {}
            for owner, piece in _pieces(self.sharding, ring_rank, self._by_query, self._held_keys):
                found.setdefault(owner, []).append(piece)
            merged = {owner: self._merge(tuple(bands)) for owner, bands in found.items()}
            self._between[ring_rank] = merged
        return self._between[ring_rank]

    def mask_bands_at(self, q0: int, q1: int) -> list[Band]:
        """Global bands of the mask that meet queries `[q0, q1)`."""
        return self._by_query.meeting(q0, q1)

    def whole_block(self, ring_rank: int) -> Rows:
        """All local key/value rows of a ring position."""
        return self._whole_blocks[ring_rank]

    def _merge(self, bands: tuple[Band, ...]) -> tuple[Band, ...]:
        if bands not in self._merged:
            self._merged[bands] = merge_bands(list(bands))
        return self._merged[bands]

    def _gathered(self, ring_rank: int) -> tuple[Step, ...]:
        pieces = [
            piece.shifted(row - queries.start, 0)
            for queries, row in self.sharding.local_rows(ring_rank)
            for band in self._by_query.meeting(*queries)
            if (piece := band.intersect(_rows(queries, self.kv_sharding.seq_len))) is not None
        ]
        everything = (TokenRange(0, self.kv_sharding.seq_len),)
        return (Step(None, everything, self._merge(tuple(pieces))),)

    def _needs(self, ring_rank: int) -> Needs:
        if ring_rank not in self._needed:
            bands = self.bands_between(ring_rank)
            rows = {owner: rows_of((b.k0, b.k1) for b in found) for owner, found in bands.items()}
            rows[ring_rank] = self.whole_block(ring_rank)
            seen: dict[int, list[tuple[int, int]]] = {}
            pieces = _pieces(self.kv_sharding, ring_rank, self._by_key, self._held_queries)
            for other, piece in pieces:
                seen.setdefault(other, []).append((piece.q0, piece.q1))
            self._needed[ring_rank] = Needs(
                ring_rank,
                self.ring_degree,
                rows,
                {owner: packed(found, rows[owner]) for owner, found in bands.items()},
                {other: rows_of(spans) for other, spans in seen.items()},
            )
        return self._needed[ring_rank]

    @cached_property
    def _whole_blocks(self) -> tuple[Rows, ...]:
        lengths = map(self.kv_sharding.ring_len, range(self.ring_degree))
        return tuple((TokenRange(0, length),) if length else () for length in lengths)

    @cached_property
    def _ring(self) -> Ring:
        return Ring(self.inner_ring_size or self.ring_degree, self._whole_blocks)

    @cached_property
    def _by_query(self) -> BandsByRow:
        return BandsByRow(self.bands)

    @cached_property
    def _by_key(self) -> BandsByRow:
        """The transposed mask: keys in the place of queries."""
        turned = (Band(b.k0, b.k1, b.q0, b.q1, -b.hi, -b.lo) for b in self.bands)
        return BandsByRow(sorted(turned))

    @cached_property
    def _held_keys(self) -> HeldRanges:
        return HeldRanges(self.kv_sharding)

    @cached_property
    def _held_queries(self) -> HeldRanges:
        return HeldRanges(self.sharding)


def _pieces(
    mine: Sharding, ring_rank: int, index: BandsByRow, others: HeldRanges
) -> Iterator[tuple[int, Band]]:
    """(other side's ring position, band in local rows of both) for one position's rows."""
    for rows, first_row in mine.local_rows(ring_rank):
        for whole in index.meeting(*rows):
            band = whole.intersect(_rows(rows, whole.k1))
            if band is None:
                continue
            for held, held_row, owner in others.meeting(band.k0, band.k1):
                piece = band.intersect(Band(*rows, *held))
                if piece is not None:
                    yield owner, piece.shifted(first_row - rows.start, held_row - held.start)


def _rows(queries: TokenRange, k_len: int) -> Band:
    return Band(*queries, 0, k_len)
