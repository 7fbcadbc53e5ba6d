"""Attention masks as sets of disjoint bands: exact, closed under intersection, never dense.

A `Band` is a rectangle of (query, key) positions cut by two diagonals. Full, causal,
sliding-window and packed-document masks, and every intersection of them, are sets of bands,
so work is counted in closed form and each trimmed band is one flash-attention call:

    causal()            sliding_window(2, 0)   documents([3, 3]) & causal()
    1 . . . . .         1 . . . . .            1 . . . . .
    1 1 . . . .         1 1 . . . .            1 1 . . . .
    1 1 1 . . .         1 1 1 . . .            1 1 1 . . .
    1 1 1 1 . .         . 1 1 1 . .            . . . 1 . .
    1 1 1 1 1 .         . . 1 1 1 .            . . . 1 1 .
    1 1 1 1 1 1         . . . 1 1 1            . . . 1 1 1

Rows are queries, columns are keys, both numbered from 0.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import SupportsIndex

from hybridcp.errors import MaskError

UNBOUNDED = 1 << 62
"""Stands for an open end; far above any position, so plain integer arithmetic stays exact."""


@dataclass(frozen=True, slots=True, order=True)
class Band:
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


@dataclass(frozen=True, slots=True)
class AttentionMask:
    """A set of disjoint bands, and the packed documents they came from, if any.

    Combine with `&`. Apply to a sequence with `bands_for`.

    Raises:
        MaskError: two bands overlap (a pair would be counted twice).
    """

    bands: tuple[Band, ...]
    document_lengths: tuple[int, ...] | None = None
    label: str = field(default="custom", compare=False)

    def __post_init__(self) -> None:
        trimmed = [band for given in self.bands if (band := given.trimmed())]
        object.__setattr__(self, "bands", tuple(sorted(trimmed)))
        overlap = first_overlap(self.bands)
        if overlap is not None:
            first, second = overlap
            raise MaskError(f"bands of a mask must be disjoint, but {first} meets {second}")

    def __and__(self, other: "AttentionMask") -> "AttentionMask":
        """The pairs allowed by both masks."""
        documents = self.document_lengths
        if documents is None or other.document_lengths is None:
            documents = documents or other.document_lengths
        elif documents != other.document_lengths:
            raise MaskError(
                f"cannot combine two different documents() masks: {len(documents)} documents of "
                f"{sum(documents)} tokens and {len(other.document_lengths)} of "
                f"{sum(other.document_lengths)}; use the finer split alone"
            )
        bands = tuple(
            band
            for a, b in _meeting_rows(self.bands, other.bands)
            if (band := a.intersect(b)) is not None
        )
        return AttentionMask(bands, documents, f"{self.label} & {other.label}")

    def __str__(self) -> str:
        return self.label

    def bands_for(self, q_len: int, k_len: int) -> tuple[Band, ...]:
        """Trimmed disjoint bands over queries `[0, q_len)` and keys `[0, k_len)`.

        Raises:
            MaskError: `documents` lengths do not sum to the sequence length.
        """
        if self.document_lengths is not None:
            total = sum(self.document_lengths)
            if q_len != total or k_len != total:
                raise MaskError(
                    f"documents() lengths sum to {total}, but the sequence has {q_len} queries and "
                    f"{k_len} keys; the lengths must cover the sequence exactly"
                )
        whole = Band(0, q_len, 0, k_len)
        return tuple(b for band in self.bands if (b := band.intersect(whole)) is not None)

    def pairs(self, q_len: int, k_len: int) -> int:
        """How many (query, key) pairs are allowed: the exact work of one head."""
        return sum(band.pairs for band in self.bands_for(q_len, k_len))


def full() -> AttentionMask:
    """Every query sees every key."""
    return AttentionMask((Band(0, UNBOUNDED, 0, UNBOUNDED),), label="full")


def causal() -> AttentionMask:
    """Query q sees keys 0..q."""
    return AttentionMask((Band(0, UNBOUNDED, 0, UNBOUNDED, hi=0),), label="causal")


def sliding_window(left: int, right: int) -> AttentionMask:
    """Query q sees keys q - left .. q + right, itself included; -1 leaves a side open.

    These are flash-attn's `window_size=(left, right)`. Hugging Face's `sliding_window=n`
    counts the query itself: it is `sliding_window(n - 1, 0)`.

    Raises:
        MaskError: a side is below -1.
    """
    for name, side in (("left", left), ("right", right)):
        if not _is_whole(side) or side < -1:
            raise MaskError(
                f"sliding_window() {name} must be a whole number ≥ 0, or -1 for no limit, "
                f"got {side!r}"
            )
    lo = -left if left >= 0 else -UNBOUNDED
    hi = right if right >= 0 else UNBOUNDED
    band = Band(0, UNBOUNDED, 0, UNBOUNDED, lo, hi)
    return AttentionMask((band,), label=f"sliding_window({left}, {right})")


def documents(lengths: Sequence[int]) -> AttentionMask:
    """Packed documents: a query sees the keys of its own document only.

    `documents([2, 3])` packs a document of 2 tokens and one of 3. Usually combined:
    `causal() & documents(lengths)`. Lengths are `diff(cu_seqlens)` of flash-attn.

    Raises:
        MaskError: no lengths, or one that is no whole number ≥ 1.
    """
    lengths = tuple(lengths) if isinstance(lengths, Iterable) else (lengths,)
    bad = next((i for i, n in enumerate(lengths) if not _is_whole(n) or n < 1), None)
    if not lengths or bad is not None:
        found = "no lengths" if bad is None else f"{lengths[bad]!r} at index {bad}"
        raise MaskError(f"documents() needs a whole number ≥ 1 for each document, got {found}")
    lengths = tuple(map(int, lengths))
    bands = tuple(
        Band(start, end, start, end) for start, end in pairwise((0, *accumulate(lengths)))
    )
    shown = ", ".join(map(str, lengths)) if len(lengths) <= 4 else f"{len(lengths)} documents"
    return AttentionMask(bands, lengths, f"documents({shown})")


def _is_whole(value: object) -> bool:
    return isinstance(value, SupportsIndex) and not isinstance(value, bool)


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


def _meeting_rows(left: Iterable[Band], right: Iterable[Band]) -> Iterator[tuple[Band, Band]]:
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
