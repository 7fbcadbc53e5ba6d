"""The schedule: for each ring position, which block is present when, and what is computed.

Mask × sharding becomes an explicit list of steps, in local row numbers. Checking, pricing,
drawing and running a layout all read these same steps. A block is the keys and values of one ring
position, or the rows of it that are needed. R ring positions:

`ring`, forward: at step t position r holds the block of position (r - t) mod R, received from
r - 1; while it computes, it passes that block on to r + 1. R - 1 hops. Backward: blocks move the
other way and begin with the block that arrived last, so at step t position r holds that of
(r + 1 + t) mod R: R - 2 hops of keys and values, then its own block from memory; the gradient of
a block follows it, R - 1 hops. (Ring Attention, arXiv 2310.01889, section 3; the reversed start is
this project's.)

`direct`: at distance d position r receives from r - d only the rows that its queries really see,
and sends r + d those that it sees; positions with nothing in common exchange nothing. Backward:
distances in reverse, beginning with the block that arrived last; the gradient of a block goes
straight back to its owner.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from hybridcp.band_index import BandsByRow, HeldRanges
from hybridcp.band_merging import merge_bands
from hybridcp.layout import Exchange
from hybridcp.masks import AttentionMask, Band
from hybridcp.sharding import Sharding, TokenRange

Rows = tuple[TokenRange, ...]
"""Local rows of one ring position: ascending ranges that do not touch."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """One message: to or from `peer`, the given local rows of the block's owner."""

    peer: int
    rows: Rows

    @property
    def size(self) -> int:
        """Number of rows."""
        return size_of(self.rows)


@dataclass(frozen=True, slots=True)
class Step:
    """One step of one ring position.

    Attributes:
        kv_owner: ring position whose keys and values are present.
        kv_rows: the owner's local rows that are present, packed one after the other.
        bands: what to compute: trimmed, disjoint; queries are local rows of this position, keys
            rows of the present block. Empty: nothing to compute.
        send: what leaves during this step: the present block (ring), or own rows (direct).
        receive: what arrives for the next step.
        send_gradient: in the backward, what leaves after this step: the gradient of `kv_rows`.
        receive_gradient: what arrives then: a gradient to be added to that of the next step's
            block (ring), or to that of own rows (direct).
    """

    kv_owner: int
    kv_rows: Rows
    bands: tuple[Band, ...]
    send: Transfer | None = None
    receive: Transfer | None = None
    send_gradient: Transfer | None = None
    receive_gradient: Transfer | None = None


class Schedule:
    """All steps of a mask over a sharding; steps of one ring position are built on demand.

        schedule = Schedule(Layout(ulysses_degree=2, ring_degree=4).shard(65536), causal())
        schedule.forward_steps(ring_rank=3)

    Args:
        sharding: who holds which tokens.
        mask: allowed pairs.
        exchange: how blocks travel.

    Attributes:
        bands: the mask's bands in global positions, cut to the sequence.

    Raises:
        MaskError: the mask does not fit the sequence length.
    """

    def __init__(
        self, sharding: Sharding, mask: AttentionMask, exchange: Exchange = "ring"
    ) -> None:
        self.sharding = sharding
        self.mask = mask
        self.exchange = exchange
        self.bands = mask.bands_for(sharding.seq_len, sharding.seq_len)
        # Both passes ask for the same, and most pairs of positions look alike in local rows.
        self._between: dict[int, dict[int, tuple[Band, ...]]] = {}
        self._merged: dict[tuple[Band, ...], tuple[Band, ...]] = {}

    @property
    def ring_degree(self) -> int:
        """R, number of ring positions and of steps."""
        return self.sharding.ring_degree

    def forward_steps(self, ring_rank: int) -> tuple[Step, ...]:
        """The R steps of one ring position in the forward pass, in order."""
        degree = self.ring_degree
        owners = [(ring_rank - t) % degree for t in range(degree)]
        bands = self.bands_between(ring_rank)
        if self.exchange == "direct":
            return self._direct_forward(ring_rank, owners, bands)
        return self._ring_steps(ring_rank, owners, bands, hops=degree - 1, direction=1)

    def backward_steps(self, ring_rank: int) -> tuple[Step, ...]:
        """The R steps of one ring position in the backward pass, in order."""
        degree = self.ring_degree
        owners = [(ring_rank + 1 + t) % degree for t in range(degree)]
        bands = self.bands_between(ring_rank)
        if self.exchange == "direct":
            return self._direct_backward(ring_rank, owners, bands)
        return self._ring_steps(ring_rank, owners, bands, hops=degree - 2, direction=-1)

    def bands_between(self, ring_rank: int) -> dict[int, tuple[Band, ...]]:
        """For one ring position as query side: key/value owner → its bands in local rows.

        Owners that the mask never pairs with this position are left out.
        """
        if ring_rank not in self._between:
            found: dict[int, list[Band]] = {}
            for owner, piece in self._pieces(ring_rank, self._by_query):
                found.setdefault(owner, []).append(piece)
            merged = {owner: self._merge(tuple(bands)) for owner, bands in found.items()}
            self._between[ring_rank] = merged
        return self._between[ring_rank]

    def _merge(self, bands: tuple[Band, ...]) -> tuple[Band, ...]:
        if bands not in self._merged:
            self._merged[bands] = merge_bands(list(bands))
        return self._merged[bands]

    def mask_bands_at(self, q0: int, q1: int) -> list[Band]:
        """Global bands of the mask that meet queries `[q0, q1)`."""
        return self._by_query.meeting(q0, q1)

    def whole_block(self, ring_rank: int) -> Rows:
        """All local rows of a ring position."""
        length = self.sharding.ring_len(ring_rank)
        return (TokenRange(0, length),) if length else ()

    def _pieces(self, ring_rank: int, index: BandsByRow) -> Iterator[tuple[int, Band]]:
        """(other side's ring position, band in local rows of both) for one position's rows."""
        for queries, q_row in self.sharding.local_rows(ring_rank):
            for whole in index.meeting(*queries):
                band = whole.intersect(Band(*queries, 0, self.sharding.seq_len))
                if band is None:
                    continue
                for keys, k_row, owner in self._held.meeting(band.k0, band.k1):
                    piece = band.intersect(Band(*queries, *keys))
                    if piece is not None:
                        yield owner, piece.shifted(q_row - queries.start, k_row - keys.start)

    def _ring_steps(
        self,
        ring_rank: int,
        owners: Sequence[int],
        bands: dict[int, tuple[Band, ...]],
        hops: int,
        direction: int,
    ) -> tuple[Step, ...]:
        degree = self.ring_degree
        ahead, behind = (ring_rank + direction) % degree, (ring_rank - direction) % degree
        blocks = [self.whole_block(owner) for owner in owners]
        steps = []
        for t, owner in enumerate(owners):
            follows = blocks[t + 1] if t + 1 < degree else ()
            # The gradient goes the way of the blocks in the backward, one step behind.
            with_gradient = direction < 0
            steps.append(
                Step(
                    kv_owner=owner,
                    kv_rows=blocks[t],
                    bands=bands.get(owner, ()),
                    send=_transfer(ahead, blocks[t] if t < hops else ()),
                    receive=_transfer(behind, follows if t < hops else ()),
                    send_gradient=_transfer(
                        ahead, blocks[t] if with_gradient and t + 1 < degree else ()
                    ),
                    receive_gradient=_transfer(behind, follows if with_gradient else ()),
                )
            )
        return tuple(steps)

    def _direct_forward(
        self, ring_rank: int, owners: Sequence[int], bands: dict[int, tuple[Band, ...]]
    ) -> tuple[Step, ...]:
        degree = self.ring_degree
        needed, seen = self._needed(ring_rank, bands), self._seen_by_others(ring_rank)
        steps = []
        for t, owner in enumerate(owners):
            to, source = (ring_rank + t + 1) % degree, (ring_rank - t - 1) % degree
            last = t + 1 == degree
            steps.append(
                Step(
                    kv_owner=owner,
                    kv_rows=needed.get(owner, ()),
                    bands=packed(bands.get(owner, ()), needed.get(owner, ())),
                    send=_transfer(to, () if last else seen.get(to, ())),
                    receive=_transfer(source, () if last else needed.get(source, ())),
                )
            )
        return tuple(steps)

    def _direct_backward(
        self, ring_rank: int, owners: Sequence[int], bands: dict[int, tuple[Band, ...]]
    ) -> tuple[Step, ...]:
        degree = self.ring_degree
        needed, seen = self._needed(ring_rank, bands), self._seen_by_others(ring_rank)
        steps = []
        for t, owner in enumerate(owners):
            distance = degree - 1 - t
            # The block of distance d - 1 travels during the step of distance d; own needs none.
            to, source = (ring_rank + distance - 1) % degree, (ring_rank - distance + 1) % degree
            travels = distance > 1
            back_from = (ring_rank + distance) % degree
            steps.append(
                Step(
                    kv_owner=owner,
                    kv_rows=needed.get(owner, ()),
                    bands=packed(bands.get(owner, ()), needed.get(owner, ())),
                    send=_transfer(to, seen.get(to, ()) if travels else ()),
                    receive=_transfer(source, needed.get(source, ()) if travels else ()),
                    send_gradient=_transfer(owner, needed.get(owner, ()) if distance else ()),
                    receive_gradient=_transfer(
                        back_from, seen.get(back_from, ()) if distance else ()
                    ),
                )
            )
        return tuple(steps)

    def _needed(self, ring_rank: int, bands: dict[int, tuple[Band, ...]]) -> dict[int, Rows]:
        """Rows of each owner that this position's queries see; of its own block, all."""
        needed = {
            owner: _union((b.k0, b.k1) for b in of_owner) for owner, of_owner in bands.items()
        }
        return {**needed, ring_rank: self.whole_block(ring_rank)}

    def _seen_by_others(self, ring_rank: int) -> dict[int, Rows]:
        """Own rows that each other position's queries see."""
        spans: dict[int, list[tuple[int, int]]] = {}
        for other, piece in self._pieces(ring_rank, self._by_key):
            spans.setdefault(other, []).append((piece.q0, piece.q1))
        return {other: _union(of_other) for other, of_other in spans.items()}

    @cached_property
    def _by_query(self) -> BandsByRow:
        return BandsByRow(self.bands)

    @cached_property
    def _by_key(self) -> BandsByRow:
        """The transposed mask: keys in the place of queries."""
        turned = (Band(b.k0, b.k1, b.q0, b.q1, -b.hi, -b.lo) for b in self.bands)
        return BandsByRow(sorted(turned))

    @cached_property
    def _held(self) -> HeldRanges:
        return HeldRanges(self.sharding)


def size_of(rows: Rows) -> int:
    """Number of rows."""
    return sum(piece.size for piece in rows)


def packed(bands: tuple[Band, ...], rows: Rows) -> tuple[Band, ...]:
    """Bands whose keys are some rows of a block, renumbered for a block of these rows alone."""
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


def _transfer(peer: int, rows: Rows) -> Transfer | None:
    return Transfer(peer, rows) if rows else None


def _union(spans: Iterator[tuple[int, int]] | Sequence[tuple[int, int]]) -> Rows:
    """The same rows as ascending ranges that do not touch."""
    found: list[TokenRange] = []
    for start, stop in sorted(spans):
        if found and start <= found[-1].stop:
            found[-1] = TokenRange(found[-1].start, max(stop, found[-1].stop))
        else:
            found.append(TokenRange(start, stop))
    return tuple(found)
