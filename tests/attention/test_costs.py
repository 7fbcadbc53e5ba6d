"""What a call sends and how much it allocates: counted, and equal to the formulas."""

from itertools import accumulate

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import hybridcp
from hybridcp import (
    HybridAttention,
    Layout,
    Schedule,
    ShardedSequence,
    causal,
    documents,
    full,
    sliding_window,
)
from hybridcp.communicator import Communicator, DoubleRing
from hybridcp.distributed import ContextParallelGroups
from hybridcp.testing import run_threads


class Counting(Communicator):
    """Counts the bytes that this rank sends to other ranks."""

    def __init__(self, inner):
        super().__init__(inner.group)
        self.sent = 0

    def all_to_all(self, received, sent, receive_sizes, send_sizes):
        own = send_sizes[self.rank]
        self.sent += (sum(send_sizes) - own) * sent.element_size()
        super().all_to_all(received, sent, receive_sizes, send_sizes)

    def exchange(self, sends, receives, *, tag):
        self.sent += sum(tensor.nbytes for tensor, _ in sends)
        return super().exchange(sends, receives, tag=tag)

    def all_gather(self, local, sizes):
        self.sent += (self.size - 1) * max(sizes) * local.element_size() * local.shape[1:].numel()
        return super().all_gather(local, sizes)


class CountingDoubleRing(DoubleRing):
    """Counts on both levels."""

    def __init__(self, inner):
        super().__init__(Counting(inner.outer), Counting(inner.inner))

    @property
    def sent(self):
        return self.outer.sent + self.inner.sent


def _counting(ring):
    return CountingDoubleRing(ring) if isinstance(ring, DoubleRing) else Counting(ring)


def _bytes(groups, layout, seq_len, heads, kv_heads, dim, dtype, mask=None):
    counting = ContextParallelGroups(_counting(groups.ring), Counting(groups.ulysses))
    seq = ShardedSequence(layout, counting, seq_len=seq_len, mask=mask or causal())
    leaves = [
        torch.randn(1, seq.local_len, h, dim, dtype=dtype).requires_grad_()
        for h in (heads, kv_heads, kv_heads)
    ]
    out = HybridAttention(layout, counting, check_agreement="never")(*leaves, seq)
    forward = (counting.ulysses.sent, counting.ring.sent)
    out.sum().backward()
    return forward, (counting.ulysses.sent - forward[0], counting.ring.sent - forward[1])


@pytest.mark.parametrize(
    ("ulysses", "ring", "heads", "kv_heads"),
    [(1, 4, 8, 8), (4, 1, 8, 8), (2, 2, 8, 2), (4, 2, 8, 2), (4, 2, 8, 1), (2, 4, 8, 4)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bytes_sent_are_those_of_the_table(ulysses, ring, heads, kv_heads, dtype):
    """Per rank and batch item, with K' = max(K, U): no repeated key/value head ever travels."""
    layout = Layout(ulysses_degree=ulysses, ring_degree=ring)
    seq_len, dim, size = 64, 8, torch.tensor([], dtype=dtype).element_size()
    rows, ring_rows = seq_len // layout.cp_degree, seq_len // ring
    kept_kv = max(kv_heads, ulysses)
    share = (ulysses - 1) / ulysses
    one_way = rows * heads * dim * share
    transposes = (2 * one_way + 2 * rows * kept_kv * dim * share) * size
    block = 2 * ring_rows * (kept_kv // ulysses) * dim
    hops = (ring - 1) * block * size
    # The backward starts from the block that came last, and gradients travel in float32.
    hops_back = max(ring - 2, 0) * block * size + (ring - 1) * block * 4
    expected = (transposes, hops), (transposes, hops_back)
    arguments = (layout, seq_len, heads, kv_heads, dim, dtype)
    assert run_threads(_bytes, layout, *arguments) == [expected] * layout.cp_degree


@pytest.mark.parametrize("seq_len", [64, 61, 7])
@pytest.mark.parametrize(
    ("ulysses", "ring", "heads", "kv_heads"),
    [(2, 3, 12, 12), (3, 2, 12, 4), (4, 2, 12, 3), (2, 4, 12, 3), (6, 1, 12, 2), (1, 6, 12, 1)],
)
def test_the_plan_says_what_the_busiest_rank_sends(ulysses, ring, heads, kv_heads, seq_len):
    """Byte for byte, also where lengths and heads do not divide."""
    layout = Layout(ulysses_degree=ulysses, ring_degree=ring)
    result = hybridcp.plan(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=8,
        ranks=layout.cp_degree,
        seq_len=seq_len,
        dtype="bf16",
    )
    planned = next(c for c in result.candidates if c.layout == layout).price.sent
    arguments = (layout, seq_len, heads, kv_heads, 8, torch.bfloat16)
    counted = run_threads(_bytes, layout, *arguments)
    assert planned.all_to_all_forward == max(forward[0] for forward, _ in counted)
    assert planned.ring_forward == max(forward[1] for forward, _ in counted)
    assert planned.all_to_all_backward == max(backward[0] for _, backward in counted)
    assert planned.ring_backward == max(backward[1] for _, backward in counted)


@pytest.mark.parametrize(
    "mask",
    [causal(), sliding_window(5, 0), causal() & documents([9, 30, 22])],
    ids=["causal", "window", "documents"],
)
@pytest.mark.parametrize("sharding", ["contiguous", "zigzag"])
@pytest.mark.parametrize(
    "exchange", [{"exchange": "ring"}, {"exchange": "direct"}, {"inner_ring_size": 2}], ids=str
)
def test_ring_bytes_are_those_of_the_schedule(exchange, sharding, mask):
    layout = Layout(ulysses_degree=2, ring_degree=4, sharding=sharding, **exchange)
    seq_len, dim, kv_heads = 61, 8, 4
    schedule = Schedule.of_layout(layout, layout.shard(seq_len), mask)
    row = 2 * dim * kv_heads // 2
    arguments = (layout, seq_len, 8, kv_heads, dim, torch.bfloat16, mask)
    for rank, (forward, backward) in enumerate(run_threads(_bytes, layout, *arguments)):
        ring_rank, _ = layout.coordinates(rank)
        steps, back = schedule.forward_steps(ring_rank), schedule.backward_steps(ring_rank)
        assert forward[1] == sum(sent.size for s in steps for sent in s.sends) * row * 2
        gradients = sum(sent.size for s in back for sent in s.gradient_sends) * row * 4
        assert backward[1] == sum(sent.size for s in back for sent in s.sends) * row * 2 + gradients


@pytest.mark.parametrize("seq_len", [64, 61, 3])
def test_an_all_gather_sends_each_block_to_every_other_position(seq_len):
    """The collective pads blocks to the longest; gradients go back in float32, unpadded."""
    layout = Layout(ulysses_degree=2, ring_degree=4, exchange="allgather")
    sharding, row = layout.shard(seq_len), 2 * 8 * 2
    longest = max(map(sharding.ring_len, range(4)))
    arguments = (layout, seq_len, 8, 4, 8, torch.bfloat16)
    for rank, (forward, backward) in enumerate(run_threads(_bytes, layout, *arguments)):
        ring_rank, _ = layout.coordinates(rank)
        gathered = 3 * longest * row * 2
        gradients = (seq_len - sharding.ring_len(ring_rank)) * row * 4
        assert (forward[1], backward[1]) == (gathered, gathered + gradients)


def _peak_bytes(mask, seq_len, kernel):
    """Most that one forward and backward on one rank allocates beyond its inputs."""
    alone = ContextParallelGroups(Communicator(None), Communicator(None))
    layout = Layout(ulysses_degree=1, ring_degree=1)
    seq = ShardedSequence(layout, alone, seq_len=seq_len, mask=mask)
    leaves = [torch.randn(1, seq.local_len, 2, 16).requires_grad_() for _ in range(3)]
    attention = HybridAttention(layout, alone, kernel=kernel)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        attention(*leaves, seq).sum().backward()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    return max(accumulate(event.nbytes() for event in events))


@pytest.mark.parametrize("kernel", ["cpu", "reference"])
@pytest.mark.parametrize(
    "mask", [causal(), full(), sliding_window(100, 0)], ids=["causal", "full", "window"]
)
def test_memory_of_a_step_is_linear_in_the_length(mask, kernel):
    """Four times the tokens, about four times the memory; an N × N tensor would be sixteen."""
    _peak_bytes(mask, 256, kernel)
    small, large = (_peak_bytes(mask, seq_len, kernel) for seq_len in (1024, 4096))
    assert large <= 4.5 * small
