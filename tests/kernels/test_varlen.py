import itertools
from collections import Counter

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridcp.kernels.varlen import group_bands
from hybridcp.masks import Band, causal, documents
from tests.kernels.brute_force import dense_mask
from tests.kernels.flash_math import flash_mask
from tests.kernels.strategies import pairs_of, trimmed_bands


@settings(max_examples=1000, deadline=None)
@given(st.lists(trimmed_bands(), min_size=1, max_size=4))
def test_flash_attn_reads_each_group_as_the_bands_say(bands: list[Band]) -> None:
    groups = group_bands(bands)
    counts = Counter(pair for group in groups for band in group for pair in pairs_of(band))
    assert counts == Counter(pair for band in bands for pair in pairs_of(band))
    for group in groups:
        longest = max(band.k_len for band in group)
        for band in group:
            read = flash_mask(band.q_len, band.k_len, longest, *band.flash_window, causal=False)
            local = band.shifted(-band.q0, -band.k0)
            assert torch.equal(read, dense_mask([local], band.q_len, band.k_len))


@settings(max_examples=500, deadline=None)
@given(st.lists(trimmed_bands(), min_size=1, max_size=6))
def test_bands_of_a_group_share_a_window_and_no_rows(bands: list[Band]) -> None:
    for group in group_bands(bands):
        assert len({band.flash_window for band in group}) == 1
        for before, after in itertools.pairwise(group):
            assert before.q1 <= after.q0
            assert before.k1 <= after.k0


def test_packed_causal_documents_are_one_call() -> None:
    lengths = [500, 20, 3000, 7]
    bands = (documents(lengths) & causal()).bands_for(3527, 3527)
    assert group_bands(bands) == [list(bands)]


def test_grouping_does_not_depend_on_the_order_of_bands() -> None:
    bands = (documents([5, 9, 1, 5, 30]) & causal()).bands_for(50, 50)
    assert group_bands(bands) == group_bands(bands[::-1])


def test_many_queries_over_few_keys_are_cut_where_flash_attn_would_drop_the_window() -> None:
    band = Band(0, 100, 0, 10, hi=0).trimmed()
    assert band is not None
    assert not torch.equal(
        flash_mask(100, 10, 10, *band.flash_window, causal=False), dense_mask([band], 100, 10)
    )
    assert group_bands([band]) == [[Band(0, 9, 0, 9, hi=0)], [Band(9, 100, 0, 10)]]
