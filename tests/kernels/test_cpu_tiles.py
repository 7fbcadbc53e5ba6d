from collections import Counter

import pytest
from hypothesis import given, settings

from hybridcp.kernels.cpu_tiles import Tile, tiles
from hybridcp.masks import Band, causal, documents, sliding_window
from tests.kernels.strategies import pairs_of, trimmed_bands


def computed_pairs(tile: Tile) -> list[tuple[int, int]]:
    """What the operator computes, by its own rules: top-left causal, or the same upside down."""
    inside = {
        "full": lambda i, j: True,
        "causal": lambda i, j: j <= i,
        "flipped": lambda i, j: tile.k_len - 1 - j <= tile.q_len - 1 - i,
    }[tile.form]
    return [
        (tile.q0 + copy * tile.q_len + i, tile.k0 + copy * tile.k_len + j)
        for copy in range(tile.copies)
        for i in range(tile.q_len)
        for j in range(tile.k_len)
        if inside(i, j)
    ]


@settings(max_examples=2000, deadline=None)
@given(trimmed_bands())
def test_tiles_cover_every_pair_of_a_band_once(band: Band) -> None:
    counts = Counter(pair for tile in tiles([band]) for pair in computed_pairs(tile))
    assert counts == Counter(pairs_of(band))


@settings(max_examples=500, deadline=None)
@given(trimmed_bands())
def test_the_operator_is_never_given_an_empty_or_headless_block(band: Band) -> None:
    for tile in tiles([band]):
        assert min(tile.q_len, tile.k_len, tile.copies) >= 1
        assert tile.form == "full" or tile.q_len >= tile.k_len, "a row without keys has lse 0"


@pytest.mark.parametrize("lengths", [[3, 3, 3, 5], [4, 2, 2, 4, 4], [1, 1, 7, 1]])
def test_packed_documents_are_covered_once(lengths: list[int]) -> None:
    total = sum(lengths)
    for mask in (causal(), sliding_window(2, 0), sliding_window(1, 1)):
        bands = (documents(lengths) & mask).bands_for(total, total)
        counts = Counter(pair for tile in tiles(bands) for pair in computed_pairs(tile))
        assert counts == Counter(pair for band in bands for pair in pairs_of(band))


def test_equal_documents_become_one_tile() -> None:
    bands = (documents([512] * 100) & causal()).bands_for(51200, 51200)
    assert tiles(bands) == [Tile(0, 0, 512, 512, "causal", copies=100)]


@pytest.mark.parametrize("left", [0, 1, 7, 1023])
def test_a_window_over_a_million_tokens_is_a_handful_of_tiles(left: int) -> None:
    bands = sliding_window(left, 0).bands_for(1 << 20, 1 << 20)
    assert len(tiles(bands)) <= 8


def test_causal_is_one_tile() -> None:
    assert tiles(causal().bands_for(64, 64)) == [Tile(0, 0, 64, 64, "causal")]
