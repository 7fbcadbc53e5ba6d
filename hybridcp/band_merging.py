"""Fewer bands with the same pairs, so fewer kernel calls."""

from hybridcp.masks import UNBOUNDED, Band


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
    share_rows = a.q0 < b.q1 and b.q0 < a.q1
    share_keys = a.k0 < b.k1 and b.k0 < a.k1
    # Documents touch at their corners only: of such bands two pieces of one diagonal can join.
    if not (share_rows or share_keys or (_is_diagonal(a) and _is_diagonal(b))):
        return None
    total = a.pairs + b.pairs
    hull = (min(a.q0, b.q0), max(a.q1, b.q1), min(a.k0, b.k0), max(a.k1, b.k1))
    for lo in {a.lo, b.lo, -UNBOUNDED}:
        for hi in {a.hi, b.hi, UNBOUNDED}:
            hull_band = Band(*hull, lo, hi)
            holds_both = hull_band.intersect(a) == a and hull_band.intersect(b) == b
            if hull_band.pairs == total and holds_both:
                return hull_band.trimmed()
    return None


def _is_diagonal(band: Band) -> bool:
    return band.lo == band.hi or band.q_len == band.k_len == 1
