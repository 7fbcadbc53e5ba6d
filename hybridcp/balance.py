"""`balanced`: which tokens each ring position holds so that any mask's work is level.

A ring waits for its busiest position at every step, so what counts is the sum over steps of the
busiest position's (query, key) pairs. Several ways to deal the tokens are made, counted exactly,
and compared; contiguous and zigzag are among them. All of it is integer arithmetic in a fixed
order, so every rank finds the same answer without talking.

The way that levels most masks: cut the sequence where the mask changes (document edges, the end of
a prefix, where a window begins to slide), and deal each long segment as a zigzag of its own. Within
a segment the work of a row is a linear function of its position, which a zigzag levels exactly, in
total and at each step. Short segments, which 2R pieces would chop too finely, stay whole on one
position each, where all their work falls into the first step. Position r gets as much less of the
long segments as it has of the short ones, so every position holds the same number of tokens.

(Zigzag by document: per-document sharding of WLB-LLM, arXiv 2503.17924. Short documents kept
whole, exact token counts, and the choice by counted work are this project's.)
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import pairwise

from hybridcp.band_index import BandsByRow
from hybridcp.bands import Band
from hybridcp.masks import AttentionMask, causal, full
from hybridcp.ring_load import busiest_by_step
from hybridcp.sharding import (
    Sharding,
    TokenRange,
    contiguous,
    even_cuts,
    joined_ranges,
    sharding_of,
    zigzag,
)

LEVEL_PERCENT = 105
"""Busiest work, summed over steps, that counts as level, in percent of the mean: then the candidate
of fewest ranges wins, because longer ranges make faster kernels."""

WORSE_PERCENT = 102
"""How much busier than the best of contiguous and zigzag a result may be, in percent."""

PIECE_TOKENS = (512, 128, 64, 32, 16, 8)
"""Shortest pieces of a zigzag to try, longest first."""

TILE = 128
"""Query rows of one attention tile; shares are multiples of it where that moves little."""

Ranges = list[tuple[int, int]]


def balanced(seq_len: int, ring_degree: int, ulysses_degree: int, mask: AttentionMask) -> Sharding:
    """The sharding whose ring positions have level work under a mask.

    Every position holds N/R tokens, rounded up or down; where zigzag is the answer, as for causal
    and full, positions may be two tokens apart. Busiest work summed over steps is at most 1.02 ×
    that of the better of contiguous and zigzag, whatever the mask.

    Args:
        seq_len: N, global tokens.
        ring_degree: R.
        ulysses_degree: U; the ranks of a position split its tokens evenly, as in any sharding.
        mask: allowed pairs.

    Raises:
        MaskError: the mask does not fit `seq_len`.
    """
    bands = mask.bands_for(seq_len, seq_len)
    plain = zigzag(seq_len, ring_degree, ulysses_degree)
    zigzag_is_level = mask in (causal(), full()) and seq_len >= TILE * ring_degree
    if ring_degree == 1 or zigzag_is_level:
        return plain
    straight = contiguous(seq_len, ring_degree, ulysses_degree)
    by_row = BandsByRow(bands)
    loads = {sharding: busiest_by_step(by_row, sharding) for sharding in (straight, plain)}
    limit = min(loads.values()) * WORSE_PERCENT
    level = sum(band.pairs for band in bands) * LEVEL_PERCENT
    dealt = (
        sharding_of(seq_len, ulysses_degree, held)
        for held in _candidates(by_row, bands, seq_len, ring_degree)
    )
    for sharding in sorted((straight, plain, *dealt), key=_most_ranges):
        if sharding not in loads:
            loads[sharding] = busiest_by_step(by_row, sharding)
        load = loads[sharding]
        if load * 100 <= limit and load * ring_degree * 100 <= level:
            return sharding
    limit = min(loads.values()) * WORSE_PERCENT
    good = (sharding for sharding, load in loads.items() if load * 100 <= limit)
    return min(good, key=_most_ranges)


def _most_ranges(sharding: Sharding) -> int:
    return max(map(len, sharding.ring_ranges))


def _candidates(
    by_row: BandsByRow, bands: Sequence[Band], seq_len: int, ring_degree: int
) -> Iterator[list[Ranges]]:
    """Tokens of each ring position, in several ways; some may be alike."""
    dealt_before: list[TokenRange] | None = None
    for piece in PIECE_TOKENS:
        shortest = 2 * ring_degree * piece
        segments = mask_segments(bands, seq_len, shortest)
        long = [segment for segment in segments if segment.size >= shortest]
        if long != dealt_before:
            dealt_before = long
            short = [segment for segment in segments if segment.size < shortest]
            held = _dealt(by_row, long, short, seq_len, ring_degree)
            if held is not None:
                yield held
    for rounds in (2, 4, 8):
        held = _repeated_zigzag(seq_len, ring_degree, rounds)
        held = _passed_on(held, _missing(held, seq_len))
        if held is not None:
            yield held


def mask_segments(bands: Sequence[Band], seq_len: int, shortest: int) -> list[TokenRange]:
    """The sequence cut where the work of a row stops being linear.

    Args:
        bands: of the mask.
        seq_len: N.
        shortest: cuts inside a band (where a window begins to slide, and then every window
            length, so that both its diagonals meet pieces in the same order) leave segments of at
            least so many tokens. Edges of bands always cut.
    """
    edges = {0, seq_len}
    kinks: set[int] = set()
    for band in bands:
        edges.update((band.q0, band.q1, band.k0, band.k1))
        if band.has_lo:
            kinks.add(band.k0 - band.lo + 1)
        if band.has_hi:
            kinks.add(band.k1 - 1 - band.hi)
        if band.has_lo and band.has_hi:
            period = max(-band.lo, band.hi) + 1
            if period >= shortest:
                kinks.update(range(band.q0 + period, band.q1, period))
    inside = sorted(kinks)
    segments = []
    for start, stop in pairwise(sorted(edges)):
        for kink in inside[bisect_right(inside, start) : bisect_left(inside, stop)]:
            if min(kink - start, stop - kink) >= shortest:
                segments.append(TokenRange(start, kink))
                start = kink
        segments.append(TokenRange(start, stop))
    return segments


def _dealt(
    by_row: BandsByRow,
    long: list[TokenRange],
    short: list[TokenRange],
    seq_len: int,
    ring_degree: int,
) -> list[Ranges] | None:
    """Short segments whole, then a zigzag of each long one; None if token counts cannot be met."""
    held = _spread(by_row, _whole_pieces(short, seq_len, ring_degree), ring_degree)
    missing = _missing(held, seq_len)
    # The longest comes last: it can take whatever shares are left.
    for segment in sorted(long, key=lambda segment: (segment.size, segment)):
        front, back = segment
        for r, share in enumerate(_shares(segment.size, missing)):
            missing[r] -= share
            half = share // 2
            held[r] += [(front, front + half), (back - (share - half), back)]
            front += half
            back -= share - half
    return _passed_on(held, missing)


def _whole_pieces(short: list[TokenRange], seq_len: int, ring_degree: int) -> list[tuple[int, int]]:
    """Short neighbours joined up to 1/32 of a position's tokens, and none above all of them."""
    few, most = seq_len // (32 * ring_degree), max(1, seq_len // ring_degree)
    joined: Ranges = []
    for start, stop in short:
        if joined and joined[-1][1] == start and stop - joined[-1][0] <= few:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return [
        (start + a, start + b)
        for start, stop in joined
        for a, b in pairwise(even_cuts(stop - start, -(-(stop - start) // most)))
    ]


def _spread(by_row: BandsByRow, pieces: list[tuple[int, int]], ring_degree: int) -> list[Ranges]:
    """Pieces to positions, the weightiest first, each to where tokens and work are fewest."""
    held: list[Ranges] = [[] for _ in range(ring_degree)]
    weighed = [(b - a, row_pairs(by_row, a, b), a, b) for a, b in pieces]
    all_tokens = sum(tokens for tokens, *_ in weighed) or 1
    all_pairs = sum(pairs for _, pairs, *_ in weighed) or 1
    weighed.sort(key=lambda item: (-max(item[0] * all_pairs, item[1] * all_tokens), item[2]))
    tokens_of, pairs_of = [0] * ring_degree, [0] * ring_degree
    for tokens, pairs, start, stop in weighed:
        # The increase of Σ (tokens/all_tokens)² + (pairs/all_pairs)², in whole numbers.
        per_token, per_pair = tokens * all_pairs**2, pairs * all_tokens**2
        increase = [t * per_token + p * per_pair for t, p in zip(tokens_of, pairs_of, strict=True)]
        r = increase.index(min(increase))
        held[r].append((start, stop))
        tokens_of[r] += tokens
        pairs_of[r] += pairs
    return held


def row_pairs(by_row: BandsByRow, q0: int, q1: int) -> int:
    """(query, key) pairs of the queries in `[q0, q1)`."""
    return sum(
        Band(max(q0, b.q0), min(q1, b.q1), b.k0, b.k1, b.lo, b.hi).pairs
        for b in by_row.meeting(q0, q1)
    )


def _shares(length: int, missing: list[int]) -> list[int]:
    """Tokens of a segment for each position, in proportion to what it lacks."""
    weights = [max(tokens, 0) for tokens in missing]
    total = sum(weights)
    if total == length:
        return weights
    unit = TILE
    # Rounding to whole units moves a share by at most a 32nd.
    while unit > 1 and length < 32 * unit * len(missing):
        unit //= 2
    shares = []
    seen = given = 0
    for weight in weights:
        seen += weight
        until = seen * (length // unit) // total
        shares.append((until - given) * unit)
        given = until
    # The last position holds the middle of the segment, so other cuts stay whole units from its
    # ends.
    shares[-1] += length % unit
    return shares


def _missing(held: list[Ranges], seq_len: int) -> list[int]:
    """Tokens that each position lacks of its N/R."""
    return [
        stop - start - sum(b - a for a, b in ranges)
        for (start, stop), ranges in zip(pairwise(even_cuts(seq_len, len(held))), held, strict=True)
    ]


def _passed_on(held: list[Ranges], missing: list[int]) -> list[Ranges] | None:
    """Exact token counts: each position passes its surplus to the next, or takes what it lacks.

    Only neighbours exchange, so what this cuts apart meets again at ring step 1.
    """
    found: list[Ranges] = [list(ranges) for ranges in map(joined_ranges, held)]
    for r in range(len(found) - 1):
        while missing[r]:
            giver, taker = (r, r + 1) if missing[r] < 0 else (r + 1, r)
            if not found[giver]:
                return None
            start, stop = max(found[giver], key=lambda piece: piece[1] - piece[0])
            found[giver].remove((start, stop))
            count = min(abs(missing[r]), stop - start)
            # Forward goes the end of a range, backward its start: later tokens stay later.
            cut = stop - count if giver == r else start + count
            first, second = (start, cut), (cut, stop)
            kept, passed = (first, second) if giver == r else (second, first)
            found[giver].append(kept)
            found[taker].append(passed)
            for position in (giver, taker):
                found[position] = list(joined_ranges(found[position]))
            missing[giver] += count
            missing[taker] -= count
    return found


def _repeated_zigzag(seq_len: int, ring_degree: int, rounds: int) -> list[Ranges]:
    """`rounds` zigzags of the whole sequence, one after the other."""
    held: list[Ranges] = [[] for _ in range(ring_degree)]
    for i, chunk in enumerate(pairwise(even_cuts(seq_len, 2 * ring_degree * rounds))):
        place = i % (2 * ring_degree)
        held[min(place, 2 * ring_degree - 1 - place)].append(chunk)
    return held
