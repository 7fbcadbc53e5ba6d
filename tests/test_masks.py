"""The band algebra against brute force over every (query, key) pair."""

from functools import reduce
from itertools import product
from operator import and_

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridcp.errors import HybridCPError, MaskError
from hybridcp.masks import (
    UNBOUNDED,
    AttentionMask,
    Band,
    causal,
    chunked,
    documents,
    first_overlap,
    full,
    prefix_lm,
    sliding_window,
)

SIDE = 12
diagonals = st.integers(-SIDE - 3, SIDE + 3)
edges = st.integers(0, SIDE)
ends = st.integers(-1, SIDE)
bands = st.builds(
    Band,
    edges,
    ends,
    edges,
    ends,
    st.just(-UNBOUNDED) | diagonals,
    st.just(UNBOUNDED) | diagonals,
)
open_bands = st.builds(
    Band,
    edges,
    st.just(UNBOUNDED) | ends,
    edges,
    st.just(UNBOUNDED) | ends,
    st.just(-UNBOUNDED) | diagonals,
    st.just(UNBOUNDED) | diagonals,
)
SQUARE = Band(0, SIDE, 0, SIDE)


def pairs(band):
    """Every pair of a band, straight from its definition; queries and keys below SIDE."""
    return {
        (q, k)
        for q in range(band.q0, min(band.q1, SIDE))
        for k in range(band.k0, min(band.k1, SIDE))
        if band.lo <= k - q <= band.hi
    }


def smallest_band(found):
    """The canonical band of a set of pairs that is known to be a band."""
    q0, q1 = min(q for q, _ in found), max(q for q, _ in found) + 1
    k0, k1 = min(k for _, k in found), max(k for _, k in found) + 1
    lo, hi = min(k - q for q, k in found), max(k - q for q, k in found)
    lo_cuts = lo > k0 - (q1 - 1)
    hi_cuts = hi < (k1 - 1) - q0
    return Band(q0, q1, k0, k1, lo if lo_cuts else -UNBOUNDED, hi if hi_cuts else UNBOUNDED)


def every_small_band():
    """All bands of up to 4 queries at 1 and up to 4 keys at 0 or 2, under every diagonal."""
    los = (-UNBOUNDED, *range(-5, 6))
    his = (*range(-5, 6), UNBOUNDED)
    for q_len, k0, k_len, lo, hi in product(range(5), (0, 2), range(5), los, his):
        yield Band(1, 1 + q_len, k0, k0 + k_len, lo, hi)


def check_count_and_trim(band):
    found = pairs(band)
    assert band.pairs == len(found), band
    assert band.trimmed() == (smallest_band(found) if found else None), band


def test_every_small_band_is_counted_and_trimmed_to_one_form():
    for band in every_small_band():
        check_count_and_trim(band)


@given(bands)
def test_any_band_is_counted_and_trimmed_to_one_form(band):
    check_count_and_trim(band)


@given(open_bands)
def test_trimming_an_open_band_keeps_its_pairs_and_settles(band):
    trimmed = band.trimmed()
    assert (pairs(trimmed) if trimmed else set()) == pairs(band)
    if trimmed:
        assert trimmed.trimmed() == trimmed
        assert trimmed.lo >= -UNBOUNDED and trimmed.hi <= UNBOUNDED


@given(open_bands, open_bands)
def test_intersection_is_that_of_the_sets(a, b):
    common = a.intersect(b)
    assert (pairs(common) if common else set()) == pairs(a) & pairs(b)
    assert a.intersect(b) == b.intersect(a)
    if common:
        assert common.trimmed() == common


@given(open_bands, st.integers(-2, SIDE + 2))
def test_keys_of_a_query(band, q):
    inside = band.intersect(SQUARE)
    keys = list(inside.keys_of(q)) if inside else []
    assert keys == sorted(k for query, k in pairs(band) if query == q)


@given(bands, st.integers(-1, SIDE))
def test_keys_of_an_untrimmed_band(band, q):
    assert list(band.keys_of(q)) == sorted(k for query, k in pairs(band) if query == q)


@given(bands, st.integers(0, 5), st.integers(0, 5))
def test_shifted_moves_every_pair(band, q_by, k_by):
    moved = band.shifted(q_by, k_by)
    back = moved.shifted(-q_by, -k_by)
    assert back == band
    expected = {(q + q_by, k + k_by) for q, k in pairs(band)}
    assert {
        (q, k)
        for q in range(moved.q0, moved.q1)
        for k in range(moved.k0, moved.k1)
        if moved.lo <= k - q <= moved.hi
    } == expected


def test_shifting_an_open_diagonal_leaves_it_open():
    moved = Band(0, 4, 0, 4, hi=0).shifted(0, 3)
    assert not moved.has_lo and moved.hi == 3


def flash_attention_pairs(band, left, right):
    """flash-attn, bottom-right aligned: i + corner - left ≤ j ≤ i + corner + right."""
    corner = band.k_len - band.q_len
    return {
        (band.q0 + i, band.k0 + j)
        for i in range(band.q_len)
        for j in range(band.k_len)
        if (left < 0 or j >= i + corner - left) and (right < 0 or j <= i + corner + right)
    }


def test_a_trimmed_band_is_one_flash_attention_window():
    for band in {trimmed for small in every_small_band() if (trimmed := small.trimmed())}:
        left, right = band.flash_window
        assert left >= 0 if band.has_lo else left == -1, band
        assert right >= 0 if band.has_hi else right == -1, band
        assert flash_attention_pairs(band, left, right) == pairs(band), band


@given(st.lists(bands, max_size=5))
def test_first_overlap_finds_any(found):
    found = sorted(found)
    sets = [pairs(band) for band in found]
    any_overlap = sum(map(len, sets)) != len(set().union(*sets))
    overlap = first_overlap(found)
    assert (overlap is not None) == any_overlap
    if overlap is not None:
        assert pairs(overlap[0]) & pairs(overlap[1])


def document_of(lengths, position):
    for number, length in enumerate(lengths):
        if position < length:
            return number
        position -= length
    raise AssertionError


LENGTHS = (3, 1, 5, 3)
ALLOWED = {
    "full": (full(), lambda q, k: True),
    "causal": (causal(), lambda q, k: k <= q),
    "window": (sliding_window(2, 1), lambda q, k: q - 2 <= k <= q + 1),
    "left-window": (sliding_window(2, -1), lambda q, k: q - 2 <= k),
    "self": (sliding_window(0, 0), lambda q, k: q == k),
    "prefix": (prefix_lm(3), lambda q, k: k < 3 or k <= q),
    "prefix-0": (prefix_lm(0), lambda q, k: k <= q),
    "chunked": (chunked(3), lambda q, k: q // 3 == k // 3),
    "chunked-4": (chunked(4), lambda q, k: q // 4 == k // 4),
    "open-window": (sliding_window(-1, -1), lambda q, k: True),
    "documents": (
        documents(LENGTHS),
        lambda q, k: document_of(LENGTHS, q) == document_of(LENGTHS, k),
    ),
}


def mask_pairs(mask, q_len=SIDE, k_len=SIDE):
    found = mask.bands_for(q_len, k_len)
    assert sum(band.pairs for band in found) == mask.pairs(q_len, k_len)
    sets = [pairs(band) for band in found]
    union = set().union(*sets)
    assert sum(map(len, sets)) == len(union), "bands overlap"
    assert all(band.trimmed() == band for band in found)
    return union


@pytest.mark.parametrize("name", ALLOWED)
def test_masks_allow_what_they_say(name):
    mask, allowed = ALLOWED[name]
    square = [(q, k) for q in range(SIDE) for k in range(SIDE)]
    assert mask_pairs(mask) == {(q, k) for q, k in square if allowed(q, k)}


@pytest.mark.parametrize("left", ALLOWED)
@pytest.mark.parametrize("right", ALLOWED)
def test_and_allows_what_both_allow(left, right):
    both = ALLOWED[left][0] & ALLOWED[right][0]
    assert mask_pairs(both) == mask_pairs(ALLOWED[left][0]) & mask_pairs(ALLOWED[right][0])
    assert both == ALLOWED[right][0] & ALLOWED[left][0]


@given(st.lists(st.integers(1, 4), min_size=1, max_size=6), st.integers(0, 3), st.integers(0, 3))
def test_documents_with_a_window(lengths, left, right):
    size = sum(lengths)
    mask = documents(lengths) & sliding_window(left, right)
    expected = sum(
        document_of(lengths, q) == document_of(lengths, k) and q - left <= k <= q + right
        for q in range(size)
        for k in range(size)
    )
    assert mask.pairs(size, size) == expected


kinds = st.one_of(
    st.just(causal()),
    st.just(full()),
    st.builds(sliding_window, st.integers(-1, 5), st.integers(-1, 5)),
    st.builds(prefix_lm, st.integers(0, SIDE + 2)),
    st.builds(chunked, st.integers(1, SIDE + 2)),
    st.builds(
        lambda q0, rows, k0, columns: AttentionMask((Band(q0, q0 + rows, k0, k0 + columns),)),
        *[st.integers(0, SIDE)] * 4,
    ),
)


@given(st.lists(kinds, min_size=1, max_size=4), st.booleans())
def test_any_masks_combine_in_any_order(masks, packed):
    masks = [*masks, documents(LENGTHS)] if packed else masks
    both = reduce(and_, masks)
    assert mask_pairs(both) == set.intersection(*map(mask_pairs, masks))
    turned = reduce(and_, masks[::-1])
    assert both == turned and hash(both) == hash(turned)


@pytest.mark.parametrize("sizes", [(3, 3), (2, 4), (4, 6), (4, 6, 9), (1, 5), (5, 12)])
def test_chunks_of_several_sizes_cut_at_all_edges(sizes):
    mask = reduce(and_, map(chunked, sizes))
    assert mask_pairs(mask) == {
        (q, k)
        for q in range(SIDE)
        for k in range(SIDE)
        if all(q // size == k // size for size in sizes)
    }


def test_chunks_that_cut_nothing_more_are_forgotten():
    assert chunked(4) & chunked(8) == chunked(4) == chunked(12) & chunked(4)
    assert (chunked(6) & chunked(4)).chunk_sizes == (4, 6)
    assert len(chunked(4).bands_for(1 << 20, 1 << 20)) == 1 << 18
    assert chunked(4).pairs(10, 6) == 4 * 4 + 4 * 2


def test_a_prefix_counts_from_the_start_of_the_sequence():
    found = mask_pairs(prefix_lm(5) & documents(LENGTHS))
    assert (0, 2) in found and (4, 3) not in found and (4, 5) not in found


@pytest.mark.parametrize(("q_len", "k_len"), [(3, 7), (7, 3), (1, 1)])
def test_lengths_may_differ(q_len, k_len):
    assert mask_pairs(causal(), q_len, k_len) == {
        (q, k) for q in range(q_len) for k in range(k_len) if k <= q
    }


def test_a_million_tokens_are_counted_exactly():
    n = 1 << 20
    assert causal().pairs(n, n) == n * (n + 1) // 2
    assert sliding_window(4095, 0).pairs(n, n) == 4096 * n - 4096 * 4095 // 2


def test_labels_say_what_was_combined():
    assert str(causal() & documents([2, 3])) == "causal & documents(2, 3)"
    assert str(documents([1] * 9)) == "documents(9 documents)"
    assert str(sliding_window(4, -1)) == "sliding_window(4, -1)"


def test_masks_with_the_same_pairs_are_equal():
    assert sliding_window(-1, 0) == causal()
    assert AttentionMask((Band(0, UNBOUNDED, 0, UNBOUNDED),)) == full()
    assert causal() != full()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: sliding_window(-2, 0), r"sliding_window\(\) left must be .*, got -2"),
        (lambda: sliding_window(0, 1.5), r"sliding_window\(\) right must be .*, got 1.5"),
        (lambda: documents([]), "got no lengths"),
        (lambda: documents([3, 0, 2]), "got 0 at index 1"),
        (lambda: documents([3, -4]), "got -4 at index 1"),
        (lambda: documents([2.7]), "got 2.7 at index 0"),
        (lambda: documents(["2"]), "got '2' at index 0"),
        (lambda: documents([True]), "got True at index 0"),
        (lambda: prefix_lm(-1), "prefix_lm.. takes a whole number of tokens ≥ 0, got -1"),
        (lambda: prefix_lm(1.5), "got 1.5"),
        (lambda: chunked(0), "chunked.. takes a whole number of tokens ≥ 1, got 0"),
        (lambda: AttentionMask((), chunk_sizes=(3, 0)), "chunk sizes of a mask must be ≥ 1"),
        (lambda: sliding_window(True, 0), "left must be a whole number"),
        (lambda: documents([3, 2]) & documents([2, 3]), "two different documents"),
        (lambda: AttentionMask((Band(0, 2, 0, 2), Band(1, 3, 1, 3))), "must be disjoint"),
        (lambda: documents([3, 2]).bands_for(6, 6), "sum to 5, but the sequence has 6"),
    ],
)
def test_refuses_with_the_reason(make, message):
    with pytest.raises(MaskError, match=message) as caught:
        make()
    assert isinstance(caught.value, HybridCPError) and isinstance(caught.value, ValueError)
