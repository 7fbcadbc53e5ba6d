"""Bands as tiles that torch's CPU flash operator can do: pure Python.

The operator does full rectangles and one triangle: causal, aligned to the top-left corner, so
with at least as many queries as keys it also does the full rows below the triangle. Turning
both queries and keys upside down gives the opposite triangle, aligned to the bottom-right:

    full     causal   flipped
    1 1 1    1 . .    1 1 1
    1 1 1    1 1 .    1 1 1
    1 1 1    1 1 1    . 1 1
    1 1 1    1 1 1    . . 1
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from hybridcp.masks import Band

Form = Literal["full", "causal", "flipped"]


@dataclass(frozen=True, slots=True)
class Tile:
    """`copies` equal tiles in a row, each starting where the one before ends, in both ways.

    Attributes:
        q0: first query.
        k0: first key.
        q_len: queries of one copy; at least `k_len` unless the form is full.
        k_len: keys of one copy.
        form: which pairs of a copy are computed.
        copies: how many; the tile covers queries `q0 .. q0 + copies * q_len`.
    """

    q0: int
    k0: int
    q_len: int
    k_len: int
    form: Form
    copies: int = 1

    @property
    def q_rows(self) -> slice:
        """Queries of all copies."""
        return slice(self.q0, self.q0 + self.copies * self.q_len)

    @property
    def k_rows(self) -> slice:
        """Keys of all copies."""
        return slice(self.k0, self.k0 + self.copies * self.k_len)


def tiles(bands: Iterable[Band]) -> list[Tile]:
    """Tiles that cover each pair of the trimmed, disjoint `bands` exactly once.

    Equal tiles that follow each other (documents of one length, the blocks of a window) become
    one tile with copies, so one operator call.
    """
    finished: list[Tile] = []
    growing: dict[tuple[int, int, Form], Tile] = {}
    for band in bands:
        for tile in _tiles_of(band):
            kind = (tile.q_len, tile.k_len, tile.form)
            last = growing.get(kind)
            if last and (last.q_rows.stop, last.k_rows.stop) == (tile.q0, tile.k0):
                growing[kind] = replace(last, copies=last.copies + tile.copies)
                continue
            if last:
                finished.append(last)
            growing[kind] = tile
    return [*finished, *growing.values()]


def _tiles_of(band: Band) -> Iterator[Tile]:
    if band.has_lo and band.has_hi:
        yield from _between(band)
    elif band.has_hi:
        yield from _up_to_hi(band)
    elif band.has_lo:
        yield from _from_lo(band)
    else:
        yield Tile(band.q0, band.k0, band.q_len, band.k_len, "full")


def _up_to_hi(band: Band) -> Iterator[Tile]:
    """Only `hi` cuts: what the first query sees is full but for its last key, then causal."""
    corner = band.q0 + band.hi
    if corner > band.k0:
        yield Tile(band.q0, band.k0, band.q_len, corner - band.k0, "full")
    yield Tile(band.q0, corner, band.q_len, band.k1 - corner, "causal")


def _from_lo(band: Band) -> Iterator[Tile]:
    """Only `lo` cuts: the same seen upside down."""
    corner = band.q1 + band.lo
    if corner < band.k1:
        yield Tile(band.q0, corner, band.q_len, band.k1 - corner, "full")
    yield Tile(band.q0, band.k0, band.q_len, corner - band.k0, "flipped")


def _between(band: Band) -> Iterator[Tile]:
    """Both diagonals cut: equal blocks of queries in the middle, then the two ends.

    In a block of `hi - lo` queries the first `hi - lo` keys are cut by `lo` only and the next
    `hi - lo` keys by `hi` only: one flipped and one causal square.
    """
    size = band.hi - band.lo
    if size == 0:
        yield Tile(band.q0, band.k0, 1, 1, "full", copies=band.q_len)
        return
    lo_cuts_from = min(max(band.k0 - band.lo, band.q0), band.q1)
    hi_cuts_until = min(max(band.k1 - band.hi, band.q0), band.q1)
    both_cut = max(hi_cuts_until - lo_cuts_from, 0)
    blocks = both_cut // size
    rest = lo_cuts_from + blocks * size
    if blocks:
        first = lo_cuts_from
        yield Tile(first, first + band.lo, size, size, "flipped", blocks)
        yield Tile(first, first + band.hi, size, size, "causal", blocks)
    if both_cut:
        ends = [
            Band(band.q0, lo_cuts_from, band.k0, band.k1),
            Band(rest, hi_cuts_until, band.k0, rest + band.hi),
            Band(rest, hi_cuts_until, rest + band.hi, band.k1),
            Band(hi_cuts_until, band.q1, band.k0, band.k1),
        ]
    else:
        ends = [
            Band(band.q0, hi_cuts_until, band.k0, band.k1),
            Band(hi_cuts_until, lo_cuts_from, band.k0, band.k1),
            Band(lo_cuts_from, band.q1, band.k0, band.k1),
        ]
    for end in ends:
        piece = band.intersect(end)
        if piece is not None:
            yield from _tiles_of(piece)
