"""torch.compile, activation checkpointing in each form, autocast: same numbers, no graph break."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from hybridcp import HybridAttention, Layout, ShardedSequence, causal, init_mesh, sliding_window
from hybridcp.attention import exchange
from hybridcp.testing import run_threads

N, HEADS, KV_HEADS, DIM = 33, 4, 2, 8


class Block(nn.Module):
    """Projection, attention and projection, as in a transformer."""

    def __init__(self, layout, mesh):
        super().__init__()
        torch.manual_seed(0)
        width = HEADS * DIM
        self.qkv = nn.Linear(width, (HEADS + 2 * KV_HEADS) * DIM)
        self.out = nn.Linear(width, width)
        self.attention = HybridAttention(layout, mesh)

    def forward(self, x, seq):
        heads = self.qkv(x).unflatten(-1, (-1, DIM))
        q, k, v = heads.split((HEADS, KV_HEADS, KV_HEADS), dim=2)
        return x + self.out(self.attention(q, k, v, seq).flatten(2))


def _run(block, function, x, seq):
    block.zero_grad()
    x = x.clone().requires_grad_()
    out = function(x, seq)
    out.square().sum().backward()
    return [out.detach(), x.grad, *(p.grad.clone() for p in block.parameters())]


def _same(left, right):
    for a, b in zip(left, right, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def _local(seq):
    return seq.shard(torch.randn(1, N, HEADS * DIM, generator=torch.Generator().manual_seed(1)), 1)


def _compiled(layout):
    mesh = init_mesh(layout, device_type="cpu")
    block = Block(layout, mesh)
    full = ShardedSequence(layout, mesh, seq_len=N, mask=causal())
    window = full.with_mask(sliding_window(4, 0))
    counters = torch._dynamo.utils.counters
    counters.clear()
    compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
    for seq in (full, window, full):
        _same(_run(block, compiled, _local(seq), seq), _run(block, block, _local(seq), seq))
    graphs = counters["stats"]["unique_graphs"]
    longer = ShardedSequence(layout, mesh, seq_len=2 * N, mask=causal())
    x = torch.randn(1, longer.local_len, HEADS * DIM, generator=torch.Generator().manual_seed(1))
    _same(_run(block, compiled, x, longer), _run(block, block, x, longer))
    return graphs, sum(counters["graph_break"].values())


@pytest.mark.parametrize("degrees", [(1, 2), (2, 1), (2, 2)], ids=str)
def test_compiles_whole_and_another_mask_needs_no_new_graph(run_distributed, degrees):
    layout = Layout(ulysses_degree=degrees[0], ring_degree=degrees[1])
    for graphs, breaks in run_distributed(_compiled, layout.cp_degree, layout, timeout=100):
        assert (graphs, breaks) == (1, 0)


def _checkpointed(groups, layout, use_reentrant):
    block = Block(layout, groups)
    seq = ShardedSequence(layout, groups, seq_len=N)
    x = _local(seq)

    def again(x, seq):
        return checkpoint(block, x, seq, use_reentrant=use_reentrant)

    _same(_run(block, again, x, seq), _run(block, block, x, seq))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing(use_reentrant):
    layout = Layout(ulysses_degree=2, ring_degree=2)
    run_threads(_checkpointed, layout, layout, use_reentrant)


def _keep_attention(context, operator, *args, **kwargs):
    keep = operator is torch.ops.hybridcp.ring_attention.default
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


def _selective(groups, layout, hops):
    block = Block(layout, groups)
    seq = ShardedSequence(layout, groups, seq_len=N)
    x = _local(seq)
    expected = _run(block, block, x, seq)

    def again(x, seq):
        return checkpoint(
            block,
            x,
            seq,
            use_reentrant=False,
            context_fn=lambda: create_selective_checkpoint_contexts(_keep_attention),
        )

    hops.clear()
    _same(_run(block, again, x, seq), expected)


def test_selective_checkpointing_keeps_attention(monkeypatch):
    """The ring runs forward once: its result is kept, not computed and sent again."""
    calls = []
    forward = exchange.forward_pass

    def counted(*args, **options):
        calls.append(1)
        return forward(*args, **options)

    monkeypatch.setattr(exchange, "forward_pass", counted)
    layout = Layout(ulysses_degree=1, ring_degree=1)
    run_threads(_selective, layout, layout, calls)
    assert len(calls) == 1


def _autocast(groups, layout):
    block = Block(layout, groups)
    seq = ShardedSequence(layout, groups, seq_len=N)
    with torch.autocast("cpu", torch.bfloat16):
        out = block(_local(seq), seq)
    out.float().square().sum().backward()
    return out.dtype, all(p.grad.isfinite().all() for p in block.parameters())


def test_autocast_reaches_attention_as_bf16():
    layout = Layout(ulysses_degree=2, ring_degree=2)
    assert all(finite for _, finite in run_threads(_autocast, layout, layout))
