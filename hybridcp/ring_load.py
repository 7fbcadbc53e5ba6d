"""How many (query, key) pairs each ring position computes at each ring step, counted exactly."""

from bisect import bisect_left, bisect_right

from hybridcp.band_index import BandsByRow
from hybridcp.bands import Band
from hybridcp.sharding import Sharding


def busiest_by_step(by_row: BandsByRow, sharding: Sharding) -> int:
    """Σ over steps t of the most pairs that any ring position has at step t.

    At step t position r holds the keys of position r - t. A ring moves in step, so this is what
    it waits for; the mean of the positions' totals is the least it can be.
    """
    degree = sharding.ring_degree
    loads = pairs_by_owner(by_row, sharding)
    return sum(max(loads[r][(r - t) % degree] for r in range(degree)) for t in range(degree))


def pairs_by_owner(by_row: BandsByRow, sharding: Sharding) -> list[list[int]]:
    """For each ring position as query side: pairs by the owner of the keys, R × R numbers.

    Key ranges that a query range sees in full, which are most, are not looked at one by one: the
    number of queries that see a range is summed up along the sequence.
    """
    keys = sorted(
        (*piece, owner) for owner, ranges in enumerate(sharding.ring_ranges) for piece in ranges
    )
    starts = [start for start, _, _ in keys]
    stops = [stop for _, stop, _ in keys]
    found = []
    for ranges in sharding.ring_ranges:
        pairs = [0] * sharding.ring_degree
        rises = [0] * (len(keys) + 1)
        for q_start, q_stop in ranges:
            for band in by_row.meeting(q_start, q_stop):
                q0, q1 = max(q_start, band.q0), min(q_stop, band.q1)
                first = bisect_right(stops, max(band.k0, q0 + band.lo))
                last = bisect_left(starts, min(band.k1, q1 + band.hi))
                # Keys that every query of the range sees.
                whole_first = bisect_left(starts, max(band.k0, q1 - 1 + band.lo), first)
                whole_last = bisect_right(stops, min(band.k1, q0 + band.hi + 1), first)
                if whole_first < whole_last:
                    rises[whole_first] += q1 - q0
                    rises[whole_last] -= q1 - q0
                else:
                    whole_first = whole_last = last
                for i in (*range(first, whole_first), *range(whole_last, last)):
                    start, stop, owner = keys[i]
                    k0, k1 = max(start, band.k0), min(stop, band.k1)
                    pairs[owner] += Band(q0, q1, k0, k1, band.lo, band.hi).pairs
        queries = 0
        for (start, stop, owner), rise in zip(keys, rises, strict=False):
            queries += rise
            pairs[owner] += queries * (stop - start)
        found.append(pairs)
    return found
