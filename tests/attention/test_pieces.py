"""Head split, online softmax and the Ulysses transposes, each alone."""

import itertools

import pytest
import torch

from hybridcp import Layout, full
from hybridcp.attention.heads import HeadSplit
from hybridcp.attention.kv_block import KVShape
from hybridcp.attention.online_softmax import OnlineSoftmax
from hybridcp.attention.sinks import fold_in_sinks
from hybridcp.attention.ulysses import (
    gather_seq_scatter_heads,
    gather_seq_scatter_heads_qkv,
    scatter_seq_gather_heads,
    scatter_seq_gather_heads_qkv,
)
from hybridcp.kernels.protocol import Partial
from hybridcp.sharding import TokenRange
from hybridcp.testing import reference_attention, run_threads

HEADS = [
    (heads, kv_heads, degree)
    for heads, kv_heads, degree in itertools.product(range(1, 13), repeat=3)
    if heads % kv_heads == 0 and degree <= heads
]


@pytest.mark.parametrize(("heads", "kv_heads", "degree"), HEADS)
def test_head_split_serves_every_query_head_its_own_key_head(heads, kv_heads, degree):
    split = HeadSplit(Layout(ulysses_degree=degree, ring_degree=1), heads, kv_heads)
    group = heads // kv_heads
    assert [h for queries in split.q_ranges for h in queries] == list(range(heads))
    sizes = [len(queries) for queries in split.q_ranges]
    assert max(sizes) - min(sizes) <= (heads % degree != 0)
    for u, (queries, keys) in enumerate(zip(split.q_ranges, split.kv_ranges, strict=True)):
        assert set(keys) == {h // group for h in queries}
        index = split.kernel_kv_heads(u)
        local = list(range(len(keys))) if index is None else list(index)
        # A grouped-query kernel gives query head i the key head i // (queries / key heads).
        each = len(queries) // len(local)
        assert each * len(local) == len(queries)
        assert [keys[local[i // each]] for i in range(len(queries))] == [
            h // group for h in queries
        ]


def _attention(q, k, v):
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k)
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v), scores.logsumexp(-1)


@pytest.mark.parametrize("cuts", [[7], [1, 7], [3, 4, 7], [1, 2, 3, 4, 5, 6, 7]], ids=str)
@pytest.mark.parametrize("scattered", [False, True])
def test_merging_parts_is_attention_over_all(cuts, scattered):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, n, 3, 4, dtype=torch.float64) for n in (5, 7, 7))
    running = OnlineSoftmax(q, 4)
    rows = torch.tensor([4, 0, 2]) if scattered else slice(1, 4)
    for start, stop in itertools.pairwise([0, *cuts]):
        part = slice(start, stop)
        running.merge(Partial(rows, *_attention(q[:, rows], k[:, part], v[:, part])))
    out, lse = _attention(q[:, rows], k, v)
    torch.testing.assert_close(running.out[:, rows], out)
    torch.testing.assert_close(running.lse[:, :, rows], lse)
    others = [1, 3] if scattered else [0, 4]
    assert not running.out[:, others].any() and (running.lse[:, :, others] == -torch.inf).all()


@pytest.mark.parametrize("gap", [-1000.0, -100.0, 0.0, 100.0, 1000.0])
def test_merge_stays_finite_at_any_gap(gap):
    q = torch.zeros(1, 1, 1, 2)
    running = OnlineSoftmax(q, 2)
    running.merge(Partial(slice(0, 1), torch.ones(1, 1, 1, 2), torch.zeros(1, 1, 1)))
    running.merge(Partial(slice(0, 1), -torch.ones(1, 1, 1, 2), torch.full((1, 1, 1), gap)))
    first = torch.sigmoid(torch.tensor(-gap, dtype=torch.float64))
    expected = float(first - (1 - first))
    torch.testing.assert_close(running.out, torch.full((1, 1, 1, 2), expected))
    assert running.lse.item() == pytest.approx(max(gap, 0.0) + (0.6931472 if gap == 0 else 0.0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_accumulators_are_never_narrower_than_float32(dtype):
    running = OnlineSoftmax(torch.zeros(1, 2, 1, 4, dtype=dtype), 4)
    expected = torch.float64 if dtype == torch.float64 else torch.float32
    assert running.out.dtype == running.lse.dtype == expected


def _labelled(batch, rows, heads, dim, offset):
    """Every entry says where it came from: batch · 10000 + row · 100 + head."""
    b = torch.arange(batch)[:, None, None] * 10000
    s = torch.arange(rows)[None, :, None] * 100
    h = torch.arange(heads)[None, None, :]
    return (b + s + h + offset)[..., None].expand(batch, rows, heads, dim).double().contiguous()


def _transposes(groups, layout, heads, kv_heads, batch, rows):
    split = HeadSplit(layout, heads, kv_heads)
    rank_lens = layout.shard(rows).rank_lens(0)
    comm = groups.ulysses
    start = sum(rank_lens[: comm.rank])
    mine = slice(start, start + rank_lens[comm.rank])
    sizes = [(heads, 3), (kv_heads, 3), (kv_heads, 2)]
    whole = [_labelled(batch, rows, *size, i * 0.25) for i, size in enumerate(sizes)]
    q, block = gather_seq_scatter_heads_qkv(*(x[:, mine] for x in whole), split, rank_lens, comm)
    queries, keys = split.q_ranges[comm.rank], split.kv_ranges[comm.rank]
    assert torch.equal(q, whole[0][:, :, queries.start : queries.stop]) and q.is_contiguous()
    kv = KVShape(batch, len(keys), 3, 2).views(block)
    for x, expected in zip(kv, whole[1:], strict=True):
        assert torch.equal(x, expected[:, :, keys.start : keys.stop])

    dq, dk, dv = scatter_seq_gather_heads_qkv(q, block, split, 2, rank_lens, comm)
    copies = torch.tensor(
        [sum(k in ranks for ranks in split.kv_ranges) for k in range(kv_heads)], dtype=torch.double
    )[:, None]
    assert torch.equal(dq, whole[0][:, mine])
    assert torch.equal(dk, whole[1][:, mine] * copies)
    assert torch.equal(dv, whole[2][:, mine] * copies)

    assert torch.equal(scatter_seq_gather_heads(q, split, rank_lens, comm), whole[0][:, mine])
    assert torch.equal(gather_seq_scatter_heads(whole[0][:, mine], split, rank_lens, comm), q)


@pytest.mark.parametrize("rows", [3, 8, 10])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(
    ("degree", "heads", "kv_heads"),
    [(2, 4, 4), (4, 4, 4), (4, 8, 2), (4, 8, 1), (3, 6, 2), (3, 7, 7), (4, 10, 5), (2, 3, 1)],
)
def test_transposes_move_every_entry_to_its_place(degree, heads, kv_heads, batch, rows):
    layout = Layout(ulysses_degree=degree, ring_degree=1)
    run_threads(_transposes, layout, layout, heads, kv_heads, batch, rows)


def test_blocks_are_taken_and_added_by_rows():
    shape = KVShape(batch=2, heads=3, head_dim=4, value_dim=5)
    block = shape.empty(9, torch.zeros(0))
    block.copy_(torch.arange(block.numel()))
    rows = (TokenRange(1, 3), TokenRange(5, 9))
    index = [1, 2, 5, 6, 7, 8]
    taken = shape.take(block, rows)
    for part, whole in zip(shape.views(taken), shape.views(block), strict=True):
        assert torch.equal(part, whole[:, index])
    assert shape.take(block, (TokenRange(0, 9),)) is block

    total = torch.zeros_like(block)
    shape.add(total, rows, taken)
    shape.add(total, rows, taken)
    for part, whole in zip(shape.views(total), shape.views(block), strict=True):
        assert torch.equal(part[:, index], 2 * whole[:, index])
        assert not part[:, [0, 3, 4]].any()


@pytest.mark.parametrize("has_key", [True, False])
def test_a_sink_is_a_key_without_a_value(has_key):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, n, 3, 4, dtype=torch.float64) for n in (5, 7, 7))
    sinks = torch.randn(3, dtype=torch.float64)
    running = OnlineSoftmax(q, 4)
    if has_key:
        running.merge(Partial(slice(0, 5), *_attention(q, k, v)))
    fold_in_sinks(running, sinks)
    out, lse = reference_attention(q, k, v, full() if has_key else (), 1.0, sinks=sinks)
    torch.testing.assert_close(running.out, out)
    torch.testing.assert_close(running.lse, lse)
