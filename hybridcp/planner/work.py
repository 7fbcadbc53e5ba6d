"""What each ring position computes at each step, read from the schedule and kept short.

Most steps of a mask are alike: a causal zigzag ring has three kinds of step, whatever R. Each kind
of step (its bands, in local rows) is kept once, so pricing costs one kernel formula a kind.
"""

from dataclasses import dataclass
from functools import cached_property

from hybridcp.band_merging import merge_bands
from hybridcp.masks import UNBOUNDED, AttentionMask, Band
from hybridcp.schedule import Schedule
from hybridcp.sharding import TokenRange

EXACT_RING_DEGREE = 64
"""Up to this R every ring position is read."""

SAMPLED_POSITIONS = 16
"""Ring positions that are read of a longer ring, evenly spaced, first and last included."""

Bands = tuple[Band, ...]


@dataclass(frozen=True)
class RingWork:
    """The steps of some ring positions.

    Attributes:
        kinds: the different steps.
        positions: for each ring position that was read, the kind of step for each distance
            d = (ring_rank - kv_owner) mod R. The forward pass visits d = 0, 1, …, R - 1, the
            backward pass R - 1, …, 0.
    """

    kinds: tuple[Bands, ...]
    positions: dict[int, tuple[int, ...]]

    @property
    def ring_degree(self) -> int:
        """R, number of distances."""
        return len(next(iter(self.positions.values())))

    @cached_property
    def kinds_at(self) -> tuple[frozenset[int], ...]:
        """For each distance the kinds of step that some position has there."""
        return tuple(frozenset(kinds) for kinds in zip(*self.positions.values(), strict=True))

    def busiest_pairs(self) -> int:
        """(query, key) pairs of the busiest position that was read."""
        pairs = [sum(band.pairs for band in bands) for bands in self.kinds]
        return max(sum(pairs[kind] for kind in kinds) for kinds in self.positions.values())


def ring_work(schedule: Schedule) -> RingWork:
    """Read the steps of a schedule: every position, or a sample of a ring above 64."""
    kinds: dict[Bands, int] = {}
    known: dict[object, int] = {}
    positions = {}
    for ring_rank in sampled_positions(schedule.ring_degree):
        if is_uniform(schedule.mask):
            row = _uniform_row(schedule, ring_rank, kinds, known)
        else:
            row = _row(schedule, ring_rank, kinds)
        positions[ring_rank] = tuple(row)
    return RingWork(tuple(kinds), positions)


def sampled_positions(ring_degree: int) -> list[int]:
    """The ring positions to read."""
    if ring_degree <= EXACT_RING_DEGREE:
        return list(range(ring_degree))
    last = SAMPLED_POSITIONS - 1
    return [i * (ring_degree - 1) // last for i in range(SAMPLED_POSITIONS)]


def is_uniform(mask: AttentionMask) -> bool:
    """Whether the mask is two diagonals over the whole plane: full, causal or one window."""
    return (
        len(mask.bands) == 1
        and not mask.chunk_sizes
        and (
            mask.bands[0].q0 == mask.bands[0].k0 == 0
            and mask.bands[0].q1 == mask.bands[0].k1 == UNBOUNDED
        )
    )


def _row(schedule: Schedule, ring_rank: int, kinds: dict[Bands, int]) -> list[int]:
    bands = schedule.bands_between(ring_rank)
    degree = schedule.ring_degree
    owners = ((ring_rank - distance) % degree for distance in range(degree))
    return [kinds.setdefault(bands.get(owner, ()), len(kinds)) for owner in owners]


def _uniform_row(
    schedule: Schedule, ring_rank: int, kinds: dict[Bands, int], known: dict[object, int]
) -> list[int]:
    """The same as `_row` where only differences of positions matter, about ten times as fast.

    Two steps are alike if their ranges are as long and each pair of ranges lies alike to the
    diagonals: wholly inside, wholly outside, or cut at the same offset.
    """
    (mask,) = schedule.mask.bands
    lo, hi = mask.lo, mask.hi
    ranges = schedule.sharding.ring_ranges
    queries = ranges[ring_rank]
    q_sizes = tuple(q1 - q0 for q0, q1 in queries)
    row = []
    for distance in range(len(ranges)):
        keys = ranges[(ring_rank - distance) % len(ranges)]
        places: list[int | bool | None] = []
        for q0, q1 in queries:
            for k0, k1 in keys:
                lowest, highest = k0 - q1 + 1, k1 - 1 - q0
                if highest < lo or lowest > hi:
                    places.append(None)
                elif lo <= lowest and highest <= hi:
                    places.append(True)
                else:
                    places.append(k0 - q0)
        signature = (q_sizes, tuple([k1 - k0 for k0, k1 in keys]), tuple(places))
        kind = known.get(signature)
        if kind is None:
            bands = bands_of_pair(mask, queries, keys)
            kind = known[signature] = kinds.setdefault(bands, len(kinds))
        row.append(kind)
    return row


def bands_of_pair(
    mask: Band, queries: tuple[TokenRange, ...], keys: tuple[TokenRange, ...]
) -> Bands:
    """One band of a mask over some query and key ranges, in local rows."""
    found = []
    q_row = 0
    for query in queries:
        k_row = 0
        for key in keys:
            piece = mask.intersect(Band(*query, *key))
            if piece is not None:
                found.append(piece.shifted(q_row - query.start, k_row - key.start))
            k_row += key.size
        q_row += query.size
    return merge_bands(found)
