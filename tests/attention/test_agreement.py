"""A call that differs on one rank is the same error on every rank, within seconds; never a hang."""

import pytest
import torch

from hybridcp import (
    HybridAttention,
    HybridCPError,
    Layout,
    ShardedSequence,
    causal,
    documents,
    init_mesh,
    sliding_window,
)
from hybridcp.attention.agreement import MAX_FACT, MAX_PROBLEM, MESSAGE_BYTES, Agreement
from hybridcp.communicator import Communicator
from hybridcp.distributed import ContextParallelGroups
from hybridcp.errors import InputError, LayoutError
from hybridcp.testing import run_threads

LAYOUTS = [
    Layout(ulysses_degree=u, ring_degree=r, order=order)
    for u, r, order in [
        (2, 2, "ulysses_inner"),
        (2, 3, "ring_inner"),
        (1, 4, "ulysses_inner"),
        (4, 1, "ulysses_inner"),
    ]
]
N = 24
ODD = 1


def id_of(layout):
    return f"u{layout.ulysses_degree}-r{layout.ring_degree}"


def _rank(groups, layout):
    return layout.rank_of(groups.ring.rank, groups.ulysses.rank)


def _call(groups, layout, what, **options):
    """One attention call, in which rank 1 does something else than the others."""
    odd = _rank(groups, layout) == ODD
    mask = sliding_window(3, 0) if odd and what == "mask" else causal()
    if what == "documents":
        # More than four look alike in words.
        mask = causal() & documents([2, 3, 5, 6, 8] if odd else [3, 2, 5, 6, 8])
    seq_len = N + layout.cp_degree if odd and what == "seq_len" else N
    seq = ShardedSequence(layout, groups, seq_len=seq_len, mask=mask)
    attention = HybridAttention(
        layout, groups, kernel="reference" if odd and what == "kernel" else "auto", **options
    )
    rows = seq.local_len - 1 if odd and what == "rows" else seq.local_len
    heads = 8 if odd and what == "heads" else 4
    kv_heads = 2 if odd and what == "kv_heads" else 4
    batch = 2 if odd and what == "batch" else 1
    dim = 16 if odd and what == "head_dim" else 8
    dtype = torch.bfloat16 if odd and what == "dtype" else torch.float32
    q = torch.zeros(batch, rows, heads, dim, dtype=dtype)
    k, v = (torch.zeros(batch, rows, kv_heads if heads == 4 else 4, dim, dtype=dtype) for _ in "kv")
    q.requires_grad_(not (odd and what == "need of a gradient"))
    scale = 0.5 if odd and what == "softmax_scale" else None
    if odd and what == "no tensor":
        q = None
    try:
        attention(q, k, v, seq, softmax_scale=scale)
    except HybridCPError as problem:
        return type(problem), str(problem)
    return None


DIFFERENCES = {
    "batch": "batch differs: 1 on ranks 0, 2",
    "heads": "heads differs: 4 on ranks 0, 2",
    "kv_heads": "kv_heads differs: 2 on rank 1; 4 on",
    "head_dim": "head_dim differs: 16 on rank 1; 8 on",
    "dtype": "dtype differs: torch.bfloat16 on rank 1; torch.float32 on",
    "softmax_scale": "scores differs: softmax_scale 0.5, softcap 0.0, no sinks on rank 1",
    "seq_len": "seq_len differs: 24 on",
    "mask": "sliding_window(3, 0) on rank 1",
    "documents": "mask differs",
    "kernel": "kernel differs: auto on",
    "need of a gradient": "need of a gradient differs: False on rank 1",
    "rows": "rank 1 of {ranks} cannot go on, so no rank does: q has",
    "no tensor": "cannot go on, so no rank does: q must be a tensor, got NoneType",
}


@pytest.mark.parametrize("layout", LAYOUTS, ids=id_of)
@pytest.mark.parametrize("what", DIFFERENCES)
def test_what_differs_on_one_rank_is_one_error_on_all(layout, what):
    outcomes = run_threads(_call, layout, layout, what, timeout=20)
    expected = DIFFERENCES[what].format(ranks=layout.cp_degree)
    assert all(outcome is not None and outcome == outcomes[0] for outcome in outcomes)
    assert outcomes[0][0] is InputError and expected in outcomes[0][1]


@pytest.mark.parametrize("mode", ["first", "always", "never"])
def test_calls_that_agree_pass(mode):
    layout = Layout(ulysses_degree=2, ring_degree=2)

    def calls(groups):
        return _call(groups, layout, "nothing", check_agreement=mode)

    assert run_threads(calls, layout) == [None] * 4


class Counting(Communicator):
    def __init__(self, inner):
        super().__init__(inner.group)
        self.gathers = 0

    def all_gather(self, local, sizes):
        self.gathers += 1
        return super().all_gather(local, sizes)


def _count(groups, layout, mode):
    counting = ContextParallelGroups(Counting(groups.ring), groups.ulysses)
    attention = HybridAttention(layout, counting, check_agreement=mode)
    asked = []
    for seq_len in (N, N, 2 * N, N):
        # A new object of the same sequence is no new kind of call.
        seq = ShardedSequence(layout, counting, seq_len=seq_len)
        q = torch.zeros(1, seq.local_len, 4, 8)
        for _ in range(2):
            attention(q, q, q, seq)
        asked.append(counting.ring.gathers)
    return asked


@pytest.mark.parametrize(
    ("mode", "asked"), [("first", [1, 1, 2, 2]), ("always", [2, 4, 6, 8]), ("never", [0] * 4)]
)
def test_first_asks_once_for_each_kind_of_call(mode, asked):
    layout = Layout(ulysses_degree=2, ring_degree=2)
    assert run_threads(_count, layout, layout, mode) == [asked] * 4


def _later(groups, layout):
    """In mode "always" a rank that goes wrong later still takes the others along."""
    seq = ShardedSequence(layout, groups, seq_len=N)
    attention = HybridAttention(layout, groups, check_agreement="always")
    q = torch.zeros(1, seq.local_len, 4, 8)
    attention(q, q, q, seq)
    if _rank(groups, layout) == ODD:
        q = q[:, 1:]
    with pytest.raises(InputError) as raised:
        attention(q, q, q, seq)
    return str(raised.value)


def test_always_catches_a_rank_that_goes_wrong_later():
    layout = Layout(ulysses_degree=2, ring_degree=2)
    outcomes = run_threads(_later, layout, layout, timeout=20)
    assert all(words == outcomes[0] and "cannot go on" in words for words in outcomes)


def test_unknown_mode():
    layout = Layout(ulysses_degree=1, ring_degree=1)
    alone = ContextParallelGroups(Communicator(None), Communicator(None))
    with pytest.raises(InputError, match="'first', 'always', 'never', got 'often'"):
        HybridAttention(layout, alone, check_agreement="often")


def _long(groups, layout):
    agreement = Agreement(layout, groups, torch.device("cpu"), "first")
    facts = {f"fact {i}": "×" * 10 * MAX_FACT for i in range(12)}
    agreement.confirm("call", facts)
    problem = InputError("×" * 10 * MAX_PROBLEM)
    with pytest.raises(InputError):
        Agreement(layout, groups, torch.device("cpu"), "first").refuse(problem)


def test_long_words_fit_the_message():
    assert 6 * max(MAX_PROBLEM, 12 * (MAX_FACT + 20)) < MESSAGE_BYTES
    layout = Layout(ulysses_degree=1, ring_degree=2)
    run_threads(_long, layout, layout)


def _different_layouts(first, others):
    import torch.distributed as dist

    with pytest.raises(LayoutError) as raised:
        init_mesh(first if dist.get_rank() == 0 else others, device_type="cpu")
    return str(raised.value)


def test_ranks_with_different_layouts_do_not_wait_for_each_other(run_distributed):
    first, others = Layout(ulysses_degree=2, ring_degree=2), Layout(ulysses_degree=4, ring_degree=1)
    outcomes = run_distributed(_different_layouts, 4, first, others)
    assert all("all ranks must have one layout" in words for words in outcomes)
