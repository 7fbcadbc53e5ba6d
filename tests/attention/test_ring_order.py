"""Every hop of the ring is posted before the step computes, and waited on after."""

import torch

from hybridcp import Layout, Schedule, full, sliding_window
from hybridcp.attention.backward import backward_pass
from hybridcp.attention.block import BlockAttention
from hybridcp.attention.forward import forward_pass
from hybridcp.attention.kv_block import KVShape
from hybridcp.kernels.protocol import Scores
from hybridcp.kernels.reference import ReferenceKernel

RING, RANK, ROWS = 4, 1, 6


class RecordingRing:
    """A ring of which only this rank exists; arriving blocks are left as they are."""

    def __init__(self, log):
        self.log, self.rank, self.size = log, RANK, RING

    def exchange(self, sends, receives, *, tag):
        (((_, to),), ((block, source),)) = sends, receives
        block.zero_()
        name = f"{'keys' if tag == 0 else 'gradient'} to {to} from {source}"
        self.log.append(f"post {name}")
        return Recorded(self.log, name)


class Recorded:
    def __init__(self, log, name):
        self.log, self.name = log, name

    def wait(self):
        self.log.append(f"wait {self.name}")


class RecordingKernel(ReferenceKernel):
    def __init__(self, log):
        self.log = log

    def forward(self, *args):
        self.log.append("compute")
        return super().forward(*args)

    def backward(self, *args):
        self.log.append("compute")
        return super().backward(*args)


def _setup(exchange, mask):
    log = []
    layout = Layout(ulysses_degree=1, ring_degree=RING, sharding="contiguous", exchange=exchange)
    schedule = Schedule(layout.shard(RING * ROWS), mask, exchange)
    shape = KVShape(batch=1, heads=2, head_dim=4, value_dim=4)
    attention = BlockAttention(RecordingKernel(log), Scores(1.0), shape, None)
    torch.manual_seed(0)
    q, kv = torch.randn(1, ROWS, 2, 4), torch.randn(ROWS * 2 * (4 + 4))

    def forward():
        steps = schedule.forward_steps(RANK)
        return forward_pass(q, kv, steps, RecordingRing(log), attention)

    def backward():
        running, last = forward()
        log.clear()
        steps, ring = schedule.backward_steps(RANK), RecordingRing(log)
        out, lse = running.out, running.lse
        backward_pass(torch.randn_like(out), q, kv, last, out, lse, steps, ring, attention)

    return log, forward, backward


def test_forward_hops_are_in_flight_while_computing():
    log, forward, _ = _setup("ring", full())
    forward()
    hop = "keys to 2 from 0"
    assert log == [f"post {hop}", "compute", f"wait {hop}"] * (RING - 1) + ["compute"]


def test_backward_saves_a_hop_and_gradients_travel_under_the_next_step():
    log, _, backward = _setup("ring", full())
    backward()
    keys, gradient = "keys to 0 from 2", "gradient to 0 from 2"
    first = [f"post {keys}", "compute", f"post {gradient}"]
    add_and_pass_on = ["compute", f"wait {gradient}", f"post {gradient}"]
    middle = [f"wait {keys}", f"post {keys}", *add_and_pass_on]
    later = [f"wait {keys}", *add_and_pass_on]
    end = ["compute", f"wait {gradient}"]
    assert log == first + middle * (RING - 3) + later + end


def test_direct_forward_asks_each_position_in_turn():
    log, forward, _ = _setup("direct", full())
    forward()
    hops = [f"keys to {(RANK + d) % RING} from {(RANK - d) % RING}" for d in range(1, RING)]
    expected = [event for hop in hops for event in (f"post {hop}", "compute", f"wait {hop}")]
    assert log == [*expected, "compute"]


def test_direct_window_exchanges_with_neighbours_only():
    """Rank 1 sees rank 0's last keys and is seen by rank 2: one message each way, each pass."""
    log, forward, backward = _setup("direct", sliding_window(2, 0))
    forward()
    assert log == ["post keys to 2 from 0", "compute", "wait keys to 2 from 0", "compute"]
    backward()
    assert log == [
        "post keys to 2 from 0",
        "wait keys to 2 from 0",
        "compute",
        "post gradient to 0 from 2",
        "compute",
        "wait gradient to 0 from 2",
    ]
