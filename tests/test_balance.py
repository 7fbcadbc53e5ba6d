"""Balanced shardings: every token once, the same everywhere, level, never worse than simpler."""

import math
import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridcp.balance import balanced, mask_segments, row_pairs
from hybridcp.band_index import BandsByRow
from hybridcp.masks import (
    AttentionMask,
    Band,
    causal,
    chunked,
    documents,
    full,
    prefix_lm,
    sliding_window,
)
from hybridcp.proof import check
from hybridcp.ring_load import busiest_by_step, pairs_by_owner
from hybridcp.schedule import Schedule
from hybridcp.sharding import contiguous, zigzag

MILLION = 1 << 20


def eighteen_documents(seed):
    """18 documents of 500 to 200k tokens, evenly spread by magnitude, in a million."""
    rng = random.Random(seed)
    while True:
        lengths = [int(math.exp(rng.uniform(math.log(500), math.log(200_000)))) for _ in range(17)]
        lengths.append(MILLION - sum(lengths))
        if 500 <= lengths[-1] <= 200_000:
            rng.shuffle(lengths)
            return lengths


def mixed_documents(seed, shortest, longest):
    rng = random.Random(seed)
    lengths = []
    while (left := MILLION - sum(lengths)) > 0:
        lengths.append(min(left, int(shortest * (longest / shortest) ** rng.random())))
    return lengths


SETS = {
    "18-documents": causal() & documents(eighteen_documents(0)),
    "18-others": causal() & documents(eighteen_documents(1)),
    "18-bidirectional": documents(eighteen_documents(2)),
    "window-4k": sliding_window(4095, 0),
    "window-40k": sliding_window(40_000, 0),
    "window-300k": sliding_window(300_000, 0),
    "window-700k": sliding_window(700_000, 0),
    "two-sided": sliding_window(100_000, 50_000),
    "short-prefix": prefix_lm(1000),
    "prefix": prefix_lm(300_000),
    "long-prefix": prefix_lm(900_000),
    "tiny-documents": causal() & documents(mixed_documents(0, 8, 3000)),
    "tiny-to-long": causal() & documents(mixed_documents(1, 10, 200_000)),
    "window-documents": sliding_window(40_000, 0) & documents(eighteen_documents(0)),
    "chunked": causal() & chunked(100_000),
    "causal": causal(),
    "full": full(),
}


def loads(mask, *shardings):
    """For each sharding: busiest total ÷ mean, and busiest at each step, summed, ÷ mean."""
    n, degree = shardings[0].seq_len, shardings[0].ring_degree
    by_row = BandsByRow(mask.bands_for(n, n))
    mean = mask.pairs(n, n) / degree
    for sharding in shardings:
        total = max(map(sum, pairs_by_owner(by_row, sharding)))
        yield total / mean, busiest_by_step(by_row, sharding) / mean


@pytest.mark.parametrize("name", SETS)
def test_a_million_tokens_on_32_positions_are_level(name):
    mask = SETS[name]
    sharding = balanced(MILLION, 32, 8, mask)
    ((total, steps),) = loads(mask, sharding)
    assert total <= 1.05 and steps <= 1.05
    assert {sharding.ring_len(r) for r in range(32)} == {MILLION // 32}


def test_what_zigzag_makes_of_documents():
    """Why balanced exists: the same documents, busiest position ÷ mean."""
    mask = SETS["18-documents"]
    (zigzag_total, zigzag_steps), (total, steps) = loads(
        mask, zigzag(MILLION, 32, 1), balanced(MILLION, 32, 1, mask)
    )
    assert zigzag_total > 1.6 and zigzag_steps > 2
    assert total < 1.03 and steps < 1.04


def test_long_rings_are_level_too():
    for mask in (SETS["18-documents"], SETS["window-300k"]):
        ((total, steps),) = loads(mask, balanced(MILLION, 256, 1, mask))
        assert total <= 1.05 and steps <= 1.05


def test_causal_on_256_positions_is_zigzag():
    assert balanced(MILLION, 256, 1, causal()) == zigzag(MILLION, 256, 1)
    assert balanced(MILLION, 256, 1, full()) == zigzag(MILLION, 256, 1)


@pytest.mark.parametrize("name", ["18-documents", "tiny-to-long", "prefix"])
def test_other_masks_share_the_tokens_of_a_layer_mask(name):
    """The same mask twice, and equal masks made apart, give the same tokens."""
    mask = SETS[name]
    again = AttentionMask(mask.bands, mask.document_lengths, mask.chunk_sizes)
    assert balanced(MILLION, 32, 1, mask) == balanced(MILLION, 32, 1, again)


def test_long_documents_are_cut_in_tiles():
    mask = causal() & documents([1 << 18, 1 << 19, 1 << 18])
    sharding = balanced(MILLION, 32, 1, mask)
    assert all(a % 64 == 0 for ranges in sharding.ring_ranges for piece in ranges for a in piece)


lengths_lists = st.lists(st.one_of(st.integers(1, 9), st.integers(1, 200)), min_size=1, max_size=12)
windows = st.builds(sliding_window, st.integers(-1, 150), st.integers(-1, 60))
parts = st.one_of(
    st.just(causal()),
    st.just(full()),
    windows,
    st.builds(prefix_lm, st.integers(0, 300)),
    st.builds(chunked, st.integers(1, 120)),
)
HOLES = AttentionMask((Band(0, 8, 0, 20), Band(16, 400, 3, 90, hi=0), Band(20, 60, 100, 300)))


@settings(max_examples=150, deadline=None)
@given(
    lengths=lengths_lists,
    pack=st.booleans(),
    first=parts,
    second=st.one_of(parts, st.just(HOLES)),
    ring=st.integers(1, 9),
    ulysses=st.integers(1, 4),
)
def test_any_mask_length_and_degree(lengths, pack, first, second, ring, ulysses):
    n = sum(lengths)
    mask = first & second
    if pack:
        mask &= documents(lengths)
    sharding = balanced(n, ring, ulysses, mask)
    held = sorted(piece for ranges in sharding.ring_ranges for piece in ranges)
    assert [piece.start for piece in held[1:]] == [piece.stop for piece in held[:-1]]
    assert (held[0].start, held[-1].stop) == (0, n)
    sizes = [sharding.ring_len(r) for r in range(ring)]
    assert max(sizes) - min(sizes) <= (2 if sharding == zigzag(n, ring, ulysses) else 1)
    assert sharding == balanced(n, ring, ulysses, mask)
    if pairs := mask.pairs(n, n):
        simple = [contiguous(n, ring, ulysses), zigzag(n, ring, ulysses)]
        (_, steps), *others = loads(mask, sharding, *simple)
        assert steps <= 1.02 * min(other for _, other in others) + 1e-9, pairs


@settings(max_examples=60, deadline=None)
@given(lengths=lengths_lists, first=parts, pack=st.booleans(), ring=st.integers(1, 6))
def test_loads_are_those_of_the_schedule(lengths, first, pack, ring):
    n = sum(lengths)
    mask = first & documents(lengths) if pack else first & HOLES
    for sharding in (zigzag(n, ring, 1), balanced(n, ring, 1, mask)):
        found = pairs_by_owner(BandsByRow(mask.bands_for(n, n)), sharding)
        schedule = Schedule(sharding, mask)
        steps = [
            [sum(b.pairs for b in s.bands) for s in schedule.forward_steps(r)] for r in range(ring)
        ]
        assert [[row[(r - t) % ring] for t in range(ring)] for r, row in enumerate(found)] == steps
        assert busiest_by_step(BandsByRow(mask.bands_for(n, n)), sharding) == sum(
            map(max, zip(*steps, strict=True))
        )


@pytest.mark.parametrize("exchange", ["ring", "direct"])
@pytest.mark.parametrize(
    "mask",
    [
        causal() & documents([900, 3, 40, 1100, 5]),
        sliding_window(700, 0),
        prefix_lm(500),
        causal() & chunked(300),
    ],
    ids=str,
)
def test_balanced_layouts_are_proved(mask, exchange):
    for ring in (2, 3, 8):
        report = check(Schedule(balanced(2048, ring, 2, mask), mask, exchange))
        assert report.pairs == mask.pairs(2048, 2048)


@pytest.mark.parametrize(
    "mask",
    [
        causal(),
        sliding_window(99, 0),
        sliding_window(30, 60),
        prefix_lm(250),
        causal() & documents([100, 50, 450]),
        sliding_window(40, 0) & documents([200, 400]),
    ],
    ids=str,
)
def test_rows_of_a_segment_have_linear_work(mask):
    bands = mask.bands_for(600, 600)
    by_row = BandsByRow(bands)
    segments = mask_segments(bands, 600, 1)
    assert [s.start for s in segments[1:]] == [s.stop for s in segments[:-1]]
    for segment in segments:
        work = [row_pairs(by_row, q, q + 1) for q in range(*segment)]
        rises = {b - a for a, b in pairwise(work)}
        assert len(rises) <= 1 or segment.size <= 3, segment


def test_windows_begin_anew_at_each_window_length():
    bands = sliding_window(99, 0).bands_for(600, 600)
    assert [tuple(s) for s in mask_segments(bands, 600, 50)] == [
        (start, start + 100) for start in range(0, 600, 100)
    ]
    assert [tuple(s) for s in mask_segments(bands, 600, 301)] == [(0, 600)]
