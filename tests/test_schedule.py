"""Every allowed pair once, in the order that the ring brings the blocks: by brute force."""

from itertools import combinations, pairwise, product
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridcp.band_merging import merge_bands
from hybridcp.layout import Exchange
from hybridcp.masks import (
    Band,
    causal,
    chunked,
    documents,
    full,
    prefix_lm,
    sliding_window,
)
from hybridcp.schedule import Schedule
from hybridcp.sharding import make_sharding
from hybridcp.steps import size_of

NAMES = ("contiguous", "zigzag")


def masks_of(n):
    """Masks over n tokens."""
    cut = max(n // 3, 1)
    lengths = [length for length in (cut, 1, n - cut - 1) if length > 0] if n > 1 else [1]
    if sum(lengths) != n:
        lengths = [n]
    return {
        "full": full(),
        "causal": causal(),
        "window": sliding_window(3, 0),
        "two-sided": sliding_window(1, 2),
        "prefix": prefix_lm(n // 2),
        "chunked": causal() & chunked(5),
        "documents": documents(lengths),
        "causal-documents": causal() & documents(lengths),
        "window-documents": sliding_window(2, 0) & documents(lengths),
    }


def make(name, n, ring, ulysses, mask, exchange="ring"):
    sharding = make_sharding(name, seq_len=n, ring_degree=ring, ulysses_degree=ulysses)
    return Schedule(sharding, mask, exchange)


def cases():
    for name, n, ring, exchange in product(
        NAMES, (1, 2, 7, 24, 29), (1, 2, 3, 4, 5), get_args(Exchange)
    ):
        for label, mask in masks_of(n).items():
            schedule = make(name, n, ring, 2, mask, exchange)
            yield f"{exchange}-{name}-{n}-ring{ring}-{label}", schedule


def rows_of(schedule, ring_rank):
    """Global position of each local row."""
    ranges = schedule.sharding.ring_ranges[ring_rank]
    return [i for piece in ranges for i in range(piece.start, piece.stop)]


def keys_of(schedule, owner):
    """Global position of each key of a block, or of the blocks of all."""
    if owner is None:
        return list(range(schedule.kv_sharding.seq_len))
    ranges = schedule.kv_sharding.ring_ranges[owner]
    return [i for piece in ranges for i in range(*piece)]


def peers(step):
    """To whom and from whom the one block goes that travels in a step."""
    (sent,), (received,) = step.sends, step.receives
    return sent.peer, received.peer


def computed_pairs(schedule, passes):
    """Global pairs, in the order computed, of one pass."""
    found = []
    for r in range(schedule.ring_degree):
        queries = rows_of(schedule, r)
        for step in getattr(schedule, f"{passes}_steps")(r):
            held = keys_of(schedule, step.kv_owner)
            keys = [held[row] for rows in step.kv_rows for row in range(*rows)]
            for band in step.bands:
                found += [
                    (queries[q], keys[k]) for q in range(band.q0, band.q1) for k in band.keys_of(q)
                ]
    return found


def allowed_pairs(schedule):
    n = schedule.sharding.seq_len
    return sorted(
        (q, k)
        for band in schedule.mask.bands_for(n, n)
        for q in range(band.q0, band.q1)
        for k in band.keys_of(q)
    )


@pytest.mark.parametrize("passes", ["forward", "backward"])
def test_each_allowed_pair_is_computed_once(passes):
    for label, schedule in cases():
        assert sorted(computed_pairs(schedule, passes)) == allowed_pairs(schedule), label


@given(
    name=st.sampled_from(NAMES),
    exchange=st.sampled_from(get_args(Exchange)),
    ring=st.integers(1, 5),
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    left=st.integers(-1, 6),
    right=st.integers(-1, 6),
)
def test_each_allowed_pair_is_computed_once_for_any_mask(
    name, exchange, ring, lengths, left, right
):
    mask = sliding_window(left, right) & documents(lengths)
    schedule = make(name, sum(lengths), ring, 1, mask, exchange)
    assert sorted(computed_pairs(schedule, "forward")) == allowed_pairs(schedule)
    assert sorted(computed_pairs(schedule, "backward")) == allowed_pairs(schedule)


def test_bands_are_trimmed_and_disjoint():
    for label, schedule in cases():
        for r in range(schedule.ring_degree):
            for step in schedule.forward_steps(r):
                assert all(band.trimmed() == band for band in step.bands), label
                meeting = (a.intersect(b) for a, b in combinations(step.bands, 2))
                assert not any(meeting), label


@pytest.mark.parametrize("ring", [1, 2, 3, 5, 8])
def test_blocks_arrive_in_the_order_of_the_ring(ring):
    schedule = make("zigzag", 64, ring, 2, causal())
    for r in range(ring):
        forward = [step.kv_owner for step in schedule.forward_steps(r)]
        backward = [step.kv_owner for step in schedule.backward_steps(r)]
        assert forward == [(r - t) % ring for t in range(ring)]
        assert backward == forward[::-1]


@pytest.mark.parametrize("ring", [1, 2, 3, 5, 8])
def test_number_of_hops(ring):
    schedule = make("zigzag", 64, ring, 2, causal())
    for r in range(ring):
        for steps, hops in (
            (schedule.forward_steps(r), ring - 1),
            (schedule.backward_steps(r), max(ring - 2, 0)),
        ):
            expected = [t < hops for t in range(ring)]
            assert [len(step.sends) for step in steps] == expected
            assert [len(step.receives) for step in steps] == expected


@pytest.mark.parametrize("ring", [2, 3, 5])
def test_forward_goes_up_the_ring_and_backward_down(ring):
    schedule = make("zigzag", 64, ring, 2, full())
    for r in range(ring):
        for step in schedule.forward_steps(r)[:-1]:
            assert peers(step) == ((r + 1) % ring, (r - 1) % ring)
        for step in schedule.backward_steps(r)[:-2]:
            assert peers(step) == ((r - 1) % ring, (r + 1) % ring)


def test_direct_sends_only_keys_that_are_seen():
    for label, schedule in cases():
        if schedule.exchange != "direct":
            continue
        for r in range(schedule.ring_degree):
            queries = rows_of(schedule, r)
            for step in schedule.forward_steps(r):
                if step.kv_owner == r:
                    continue
                seen = {
                    k
                    for band in step.bands
                    for q in range(band.q0, band.q1)
                    for k in band.keys_of(q)
                }
                assert seen == set(range(size_of(step.kv_rows))), label
                assert queries or not seen


def test_direct_needs_a_halo_for_a_window():
    """8 tokens each, 3 back: three keys from the position before, nothing from others."""
    schedule = make("contiguous", 32, 4, 1, sliding_window(3, 0), "direct")
    received = [
        [sum(size_of(arrives.rows) for arrives in step.receives) for step in steps]
        for steps in map(schedule.forward_steps, range(4))
    ]
    assert received == [[0, 0, 0, 0], [3, 0, 0, 0], [3, 0, 0, 0], [3, 0, 0, 0]]


def test_direct_sends_three_quarters_of_what_the_ring_sends_for_causal_zigzag():
    def sent(exchange):
        schedule = make("zigzag", 1024, 16, 1, causal(), exchange)
        steps = (step for r in range(16) for step in schedule.forward_steps(r))
        return sum(sent.size for step in steps for sent in step.sends)

    assert sent("direct") / sent("ring") == pytest.approx(0.75)


def bands_per_step(name, n, ring, mask):
    schedule = make(name, n, ring, 2, mask)
    return [[len(step.bands) for step in schedule.forward_steps(r)] for r in range(ring)]


@pytest.mark.parametrize("ring", [1, 2, 3, 4, 8])
def test_causal_zigzag_is_one_kernel_call_a_step(ring):
    assert bands_per_step("zigzag", 16 * ring, ring, causal()) == [[1] * ring] * ring


@pytest.mark.parametrize("n", [17, 31, 63])
def test_causal_zigzag_of_an_odd_length_is_at_most_two_calls_a_step(n):
    assert max(map(max, bands_per_step("zigzag", n, 4, causal()))) <= 2


@pytest.mark.parametrize("name", NAMES)
def test_full_attention_is_one_kernel_call_a_step(name):
    assert bands_per_step(name, 50, 4, full()) == [[1] * 4] * 4


def test_contiguous_causal_skips_later_blocks():
    assert bands_per_step("contiguous", 32, 4, causal()) == [
        [1, 0, 0, 0],
        [1, 1, 0, 0],
        [1, 1, 1, 0],
        [1, 1, 1, 1],
    ]


def test_a_window_reaches_only_neighbours():
    """8 tokens each, 4 back: the block before, and the last one of all never."""
    assert bands_per_step("contiguous", 32, 4, sliding_window(4, 0)) == [
        [1, 0, 0, 0],
        [1, 1, 0, 0],
        [1, 1, 0, 0],
        [1, 1, 0, 0],
    ]


def test_documents_inside_a_block_stay_apart():
    """Two documents of 4 in each block of 8 are two calls, and nothing travels for use."""
    mask = causal() & documents([4] * 8)
    assert bands_per_step("contiguous", 32, 4, mask) == [[2, 0, 0, 0]] * 4


SIDE = 10
small_bands = st.builds(
    Band,
    st.integers(0, SIDE),
    st.integers(0, SIDE),
    st.integers(0, SIDE),
    st.integers(0, SIDE),
    st.integers(-SIDE, SIDE),
    st.integers(-SIDE, SIDE),
)


def pair_list(bands):
    return sorted((q, k) for b in bands for q in range(b.q0, b.q1) for k in b.keys_of(q))


@given(st.lists(small_bands, max_size=6))
def test_merging_keeps_the_pairs(found):
    disjoint = []
    for band in (b for given_band in found if (b := given_band.trimmed())):
        if not any(band.intersect(other) for other in disjoint):
            disjoint.append(band)
    merged = merge_bands(disjoint)
    assert pair_list(merged) == pair_list(disjoint)
    assert len(merged) <= len(disjoint)
    assert all(band.trimmed() == band for band in merged)


@given(
    band=small_bands,
    q_cuts=st.lists(st.integers(0, SIDE), max_size=2),
    k_cuts=st.lists(st.integers(0, SIDE), max_size=2),
)
def test_merging_undoes_a_cut_of_a_rectangle(band, q_cuts, k_cuts):
    whole = Band(band.q0, band.q1, band.k0, band.k1).trimmed()
    if whole is None:
        return
    q_edges = [0, *sorted(q_cuts), SIDE]
    k_edges = [0, *sorted(k_cuts), SIDE]
    pieces = [
        piece
        for q0, q1 in pairwise(q_edges)
        for k0, k1 in pairwise(k_edges)
        if (piece := whole.intersect(Band(q0, q1, k0, k1)))
    ]
    assert merge_bands(pieces) == (whole,)
