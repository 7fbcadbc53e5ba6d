"""Every hop of the ring is posted before the step computes, and waited on after."""

import torch

from hybridcp import Layout, Schedule, causal
from hybridcp.attention.ring import BlockAttention, ring_backward, ring_forward
from hybridcp.kernels.reference import ReferenceKernel

RING, RANK, ROWS = 4, 1, 6


class RecordingRing:
    """A ring of which only this rank exists; arriving blocks are left as they are."""

    def __init__(self, log):
        self.log, self.rank, self.size = log, RANK, RING

    def exchange(self, *, send, to, receive, source, tag):
        if to is None:
            return Recorded(self.log, None)
        receive.zero_()
        name = f"{'keys' if tag == 0 else 'gradient'} to {to} from {source}"
        self.log.append(f"post {name}")
        return Recorded(self.log, name)


class Recorded:
    def __init__(self, log, name):
        self.log, self.name = log, name

    def wait(self):
        if self.name:
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


def _setup():
    log = []
    schedule = Schedule(Layout(ulysses_degree=1, ring_degree=RING).shard(RING * ROWS), causal())
    attention = BlockAttention(RecordingKernel(log), 1.0, None)
    torch.manual_seed(0)
    q, kv = torch.randn(1, ROWS, 2, 4), torch.randn(2, 1, ROWS, 2, 4)
    return log, schedule, attention, q, kv


def test_forward_hops_are_in_flight_while_computing():
    log, schedule, attention, q, kv = _setup()
    ring_forward(q, kv, schedule.forward_steps(RANK), [ROWS] * RING, RecordingRing(log), attention)
    hop = "keys to 2 from 0"
    assert log == [f"post {hop}", "compute", f"wait {hop}"] * (RING - 1) + ["compute"]


def test_backward_saves_a_hop_and_gradients_travel_under_the_next_step():
    log, schedule, attention, q, kv = _setup()
    block_lens, ring = [ROWS] * RING, RecordingRing(log)
    out, lse, last = ring_forward(q, kv, schedule.forward_steps(RANK), block_lens, ring, attention)
    log.clear()
    ring_backward(
        torch.randn_like(out),
        q,
        kv,
        last,
        out,
        lse,
        schedule.backward_steps(RANK),
        block_lens,
        ring,
        attention,
    )
    keys, gradient = "keys to 0 from 2", "gradient to 0 from 2"
    first = [f"post {keys}", "compute", f"wait {keys}", f"post {gradient}"]
    middle = [f"post {keys}", "compute", f"wait {keys}", f"wait {gradient}", f"post {gradient}"]
    later = ["compute", f"wait {gradient}", f"post {gradient}"]
    end = ["compute", f"wait {gradient}"]
    assert log == first + middle * (RING - 3) + later + end
