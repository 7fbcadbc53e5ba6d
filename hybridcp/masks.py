"""Attention masks as sets of disjoint bands: exact, closed under intersection, never dense.

A `Band` is a rectangle of (query, key) positions cut by two diagonals. Every mask here, and
every intersection of them, is a set of bands, so work is counted in closed form and each
trimmed band is one flash-attention call:

    causal()            sliding_window(2, 0)   documents([3, 3]) & causal()
    1 . . . . .         1 . . . . .            1 . . . . .
    1 1 . . . .         1 1 . . . .            1 1 . . . .
    1 1 1 . . .         1 1 1 . . .            1 1 1 . . .
    1 1 1 1 . .         . 1 1 1 . .            . . . 1 . .
    1 1 1 1 1 .         . . 1 1 1 .            . . . 1 1 .
    1 1 1 1 1 1         . . . 1 1 1            . . . 1 1 1

    prefix_lm(3)        chunked(4)             chunked(4) & causal()
    1 1 1 . . .         1 1 1 1 . .            1 . . . . .
    1 1 1 . . .         1 1 1 1 . .            1 1 . . . .
    1 1 1 . . .         1 1 1 1 . .            1 1 1 . . .
    1 1 1 1 . .         1 1 1 1 . .            1 1 1 1 . .
    1 1 1 1 1 .         . . . . 1 1            . . . . 1 .
    1 1 1 1 1 1         . . . . 1 1            . . . . 1 1

Rows are queries, columns are keys, both numbered from 0.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import SupportsIndex

from hybridcp.bands import UNBOUNDED, Band, first_overlap, meeting_rows
from hybridcp.errors import MaskError

__all__ = [
    "UNBOUNDED",
    "AttentionMask",
    "Band",
    "causal",
    "chunked",
    "documents",
    "first_overlap",
    "full",
    "prefix_lm",
    "sliding_window",
]


@dataclass(frozen=True, slots=True)
class AttentionMask:
    """Which (query, key) pairs are allowed, for a sequence of any length.

    Combine with `&`. Apply to a sequence with `bands_for`.

    Attributes:
        bands: disjoint bands, before chunks cut them.
        document_lengths: the packed documents that the bands came from, if any.
        chunk_sizes: for each size, a pair is allowed only inside one chunk of so many positions.
            Kept as sizes because chunks of an open sequence have no last one; ascending, without
            multiples of one another, which cut nothing more.
        label: how to show the mask; does not count in comparisons.

    Raises:
        MaskError: two bands overlap (a pair would be counted twice), or a chunk size is below 1.
    """

    bands: tuple[Band, ...]
    document_lengths: tuple[int, ...] | None = None
    chunk_sizes: tuple[int, ...] = ()
    label: str = field(default="custom", compare=False)

    def __post_init__(self) -> None:
        trimmed = [band for given in self.bands if (band := given.trimmed())]
        object.__setattr__(self, "bands", tuple(sorted(trimmed)))
        if any(size < 1 for size in self.chunk_sizes):
            raise MaskError(f"chunk sizes of a mask must be ≥ 1, got {self.chunk_sizes}")
        object.__setattr__(self, "chunk_sizes", _without_multiples(self.chunk_sizes))
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
            for a, b in meeting_rows(self.bands, other.bands)
            if (band := a.intersect(b)) is not None
        )
        chunk_sizes = self.chunk_sizes + other.chunk_sizes
        return AttentionMask(bands, documents, chunk_sizes, f"{self.label} & {other.label}")

    def __str__(self) -> str:
        return self.label

    def bands_for(self, q_len: int, k_len: int) -> tuple[Band, ...]:
        """Trimmed disjoint bands over queries `[0, q_len)` and keys `[0, k_len)`, ascending.

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
        found = tuple(b for band in self.bands if (b := band.intersect(whole)) is not None)
        return tuple(sorted(self._cut_by_chunks(found))) if self.chunk_sizes else found

    def pairs(self, q_len: int, k_len: int) -> int:
        """How many (query, key) pairs are allowed: the exact work of one head."""
        return sum(band.pairs for band in self.bands_for(q_len, k_len))

    def _cut_by_chunks(self, bands: tuple[Band, ...]) -> Iterator[Band]:
        """The parts of bounded bands that lie in one chunk of each size."""
        end = max((max(band.q1, band.k1) for band in bands), default=0)
        edges = sorted({edge for size in self.chunk_sizes for edge in range(0, end, size)} | {end})
        for band in bands:
            # Only chunks that hold both a query and a key of the band.
            first = bisect_right(edges, max(band.q0, band.k0)) - 1
            last = bisect_left(edges, min(band.q1, band.k1))
            for start, stop in pairwise(edges[first : last + 1]):
                part = band.intersect(Band(start, stop, start, stop))
                if part is not None:
                    yield part


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


def prefix_lm(prefix: int) -> AttentionMask:
    """Every query sees keys 0..prefix - 1, and query q also those up to q.

    The prefix counts from position 0 of the sequence: with `documents(lengths)` it is a prefix
    of the first document alone. `prefix_lm(0)` is `causal()`.

    Raises:
        MaskError: `prefix` is no whole number ≥ 0.
    """
    if not _is_whole(prefix) or prefix < 0:
        raise MaskError(f"prefix_lm() takes a whole number of tokens ≥ 0, got {prefix!r}")
    # Queries behind the prefix see all up to themselves: one band, so one kernel call.
    end = int(prefix)
    bands = (Band(0, end, 0, end), Band(end, UNBOUNDED, 0, UNBOUNDED, hi=0))
    return AttentionMask(bands, label=f"prefix_lm({prefix})")


def chunked(size: int) -> AttentionMask:
    """A query sees the keys of its own chunk: positions 0..size - 1, and so on.

    Not causal by itself: chunked-local attention of a decoder is `chunked(size) & causal()`.
    Chunks count from position 0 of the sequence, not of a document.

    Raises:
        MaskError: `size` is no whole number ≥ 1.
    """
    if not _is_whole(size) or size < 1:
        raise MaskError(f"chunked() takes a whole number of tokens ≥ 1, got {size!r}")
    return AttentionMask(full().bands, chunk_sizes=(int(size),), label=f"chunked({size})")


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
    return AttentionMask(bands, lengths, label=f"documents({shown})")


def _is_whole(value: object) -> bool:
    return isinstance(value, SupportsIndex) and not isinstance(value, bool)


def _without_multiples(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Ascending sizes whose chunk edges are those of all sizes."""
    kept: list[int] = []
    for size in sorted(sizes):
        if not any(size % other == 0 for other in kept):
            kept.append(size)
    return tuple(kept)
