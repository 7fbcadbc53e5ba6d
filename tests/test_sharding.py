"""Every token has exactly one owner, whatever divides by what."""

from itertools import pairwise, product

import pytest

from hybridcp.errors import LayoutError
from hybridcp.masks import Band, causal
from hybridcp.sharding import (
    SHARDING_NAMES,
    Sharding,
    TokenRange,
    contiguous,
    even_cuts,
    make_sharding,
    zigzag,
)

MAKE = {"contiguous": contiguous, "zigzag": zigzag}


def tokens(ranges):
    return [i for piece in ranges for i in range(piece.start, piece.stop)]


def every_sharding(name):
    for n, ring, ulysses in product(range(41), range(1, 6), range(1, 5)):
        yield MAKE[name](n, ring, ulysses)


def test_names_are_all_here():
    assert {*MAKE, "balanced"} == set(SHARDING_NAMES)


def test_a_balanced_sharding_asks_for_the_mask():
    with pytest.raises(LayoutError, match=r"depends on the mask: pass it, layout.shard"):
        make_sharding("balanced", seq_len=4, ring_degree=2, ulysses_degree=1)


@pytest.mark.parametrize("name", MAKE)
def test_every_token_is_held_once(name):
    for sharding in every_sharding(name):
        held = [tokens(ranges) for ranges in sharding.ring_ranges]
        assert sorted(i for part in held for i in part) == list(range(sharding.seq_len))
        for r, part in enumerate(held):
            assert part == sorted(part)
            assert sharding.ring_len(r) == len(part)


@pytest.mark.parametrize("name", MAKE)
def test_ulysses_ranks_share_a_ring_position_in_order(name):
    for sharding in every_sharding(name):
        for r, ranges in enumerate(sharding.ring_ranges):
            parts = [tokens(sharding.rank_ranges(r, u)) for u in range(sharding.ulysses_degree)]
            assert [i for part in parts for i in part] == tokens(ranges)
            assert tuple(map(len, parts)) == sharding.rank_lens(r)
            assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize("name", MAKE)
def test_ranges_are_never_empty_or_touching(name):
    for sharding in every_sharding(name):
        for r in range(sharding.ring_degree):
            for u in range(sharding.ulysses_degree):
                ranges = sharding.rank_ranges(r, u)
                assert all(piece.size > 0 for piece in ranges)
            ranges = sharding.ring_ranges[r]
            assert all(piece.size > 0 for piece in ranges)
            assert all(a.stop < b.start for a, b in pairwise(ranges))


@pytest.mark.parametrize(("name", "spread"), [("contiguous", 1), ("zigzag", 2)])
def test_ring_positions_are_level(name, spread):
    for sharding in every_sharding(name):
        lengths = [sharding.ring_len(r) for r in range(sharding.ring_degree)]
        assert max(lengths) - min(lengths) <= spread


def causal_work(sharding, ring_rank):
    bands = causal().bands_for(sharding.seq_len, sharding.seq_len)
    rows = [Band(*piece, 0, sharding.seq_len) for piece in sharding.ring_ranges[ring_rank]]
    return sum(common.pairs for band in bands for row in rows if (common := band.intersect(row)))


@pytest.mark.parametrize("ring_degree", [1, 2, 3, 4, 8])
def test_zigzag_is_exactly_level_for_causal(ring_degree):
    sharding = zigzag(48 * ring_degree, ring_degree, 2)
    assert len({causal_work(sharding, r) for r in range(ring_degree)}) == 1


def test_zigzag_is_cut_over_the_ring_alone():
    """A zigzag over all four ranks would pair chunks 0 and 7, 1 and 6, …: another layout."""
    sharding = zigzag(16, 2, 2)
    assert sharding.ring_ranges == (
        (TokenRange(0, 4), TokenRange(12, 16)),
        (TokenRange(4, 12),),
    )
    ranks = [tokens(sharding.rank_ranges(r, u)) for r in range(2) for u in range(2)]
    assert ranks == [[0, 1, 2, 3], [12, 13, 14, 15], [4, 5, 6, 7], [8, 9, 10, 11]]


def test_a_cut_may_fall_inside_a_range():
    sharding = zigzag(12, 2, 4)
    assert [sharding.rank_ranges(0, u) for u in range(4)] == [
        ((0, 1),),
        ((1, 3),),
        ((9, 10),),
        ((10, 12),),
    ]
    three = zigzag(16, 2, 3)
    assert three.rank_ranges(0, 1) == ((2, 4), (12, 13))


def test_fewer_tokens_than_ranks():
    sharding = contiguous(2, 4, 2)
    held = [sharding.rank_ranges(r, u) for r in range(4) for u in range(2)]
    assert sum(len(ranges) for ranges in held) == 2
    assert tokens([piece for ranges in held for piece in ranges]) == [0, 1]


def test_even_cuts():
    assert even_cuts(10, 4) == [0, 2, 5, 7, 10]
    assert even_cuts(0, 3) == [0, 0, 0, 0]


@pytest.mark.parametrize(
    "ring_ranges",
    [
        (((0, 4),), ((5, 8),)),
        (((0, 5),), ((4, 8),)),
        (((0, 4),), ((4, 7),)),
        (((1, 4),), ((4, 8),)),
        (((0, 4), (4, 6)), ((6, 8),)),
        (((6, 8), (0, 4)), ((4, 6),)),
    ],
    ids=["gap", "overlap", "short", "late", "touching", "descending"],
)
def test_refuses_ranges_that_are_no_sharding(ring_ranges):
    typed = tuple(tuple(TokenRange(*piece) for piece in ranges) for ranges in ring_ranges)
    with pytest.raises(LayoutError):
        Sharding(8, 1, typed)


@pytest.mark.parametrize("name", SHARDING_NAMES)
@pytest.mark.parametrize("what", ["seq_len", "ring_degree", "ulysses_degree"])
@pytest.mark.parametrize("value", [0, -3, 2.0, True, "8", None])
def test_refuses_sizes_below_one(name, what, value):
    sizes = {"seq_len": 8, "ring_degree": 2, "ulysses_degree": 2, what: value}
    with pytest.raises(LayoutError, match=f"^{what} must be a whole number ≥ 1, got"):
        make_sharding(name, **sizes)


def test_an_unknown_name_lists_the_names():
    with pytest.raises(LayoutError, match="unknown sharding 'striped'; there are contiguous, zig"):
        make_sharding("striped", seq_len=4, ring_degree=1, ulysses_degree=1)


def test_a_range_must_hold_tokens():
    whole, empty = (TokenRange(0, 4),), (TokenRange(4, 4),)
    with pytest.raises(LayoutError, match="must hold tokens"):
        Sharding(4, 1, (whole, empty))
