"""`ShardedSequence`: which tokens a rank holds, positions, cutting and restoring."""

import pytest
import torch

from hybridcp import Layout, ShardedSequence, causal, documents, sliding_window
from hybridcp.errors import InputError
from hybridcp.testing import run_threads

LAYOUTS = [
    Layout(ulysses_degree=u, ring_degree=r, sharding=sharding, order=order)
    for u, r, order in [
        (1, 1, "ulysses_inner"),
        (2, 2, "ulysses_inner"),
        (3, 2, "ring_inner"),
        (1, 4, "ulysses_inner"),
    ]
    for sharding in ("contiguous", "zigzag")
]


def id_of(layout):
    return f"u{layout.ulysses_degree}-r{layout.ring_degree}-{layout.sharding}"


def _round_trip(groups, layout, seq_len):
    seq = ShardedSequence(layout, groups, seq_len=seq_len)
    everything = torch.arange(2 * seq_len * 3).view(2, seq_len, 3)
    for dim in (1, -2):
        local = seq.shard(everything, dim)
        assert local.is_contiguous() and local.shape == (2, seq.local_len, 3)
        assert torch.equal(local, everything[:, seq.indices])
        assert torch.equal(seq.unshard(local, dim), everything)
    assert torch.equal(seq.position_ids, seq.indices)
    return seq.indices.tolist()


@pytest.mark.parametrize("seq_len", [1, 2, 3, 5, 8, 16, 33])
@pytest.mark.parametrize("layout", LAYOUTS, ids=id_of)
def test_shard_and_unshard_are_inverse(layout, seq_len):
    held = run_threads(_round_trip, layout, layout, seq_len)
    assert sorted(i for of_rank in held for i in of_rank) == list(range(seq_len))
    assert all(of_rank == sorted(of_rank) for of_rank in held)


def test_zigzag_is_cut_over_the_ring_and_then_over_ulysses():
    layout = Layout(ulysses_degree=2, ring_degree=2)
    held = run_threads(_round_trip, layout, layout, 16)
    assert held == [[0, 1, 2, 3], [12, 13, 14, 15], [4, 5, 6, 7], [8, 9, 10, 11]]


def _positions(groups, layout, lengths):
    mask = causal() & documents(lengths)
    seq = ShardedSequence(layout, groups, seq_len=sum(lengths), mask=mask)
    return seq.unshard(seq.position_ids, 0).tolist()


@pytest.mark.parametrize("layout", LAYOUTS, ids=id_of)
def test_positions_start_again_in_each_document(layout):
    lengths = [1, 5, 2, 1, 7]
    expected = [position for length in lengths for position in range(length)]
    assert run_threads(_positions, layout, layout, lengths)[0] == expected


def _batch(groups, layout, mask, batch):
    seq = ShardedSequence(layout, groups, seq_len=12, mask=mask)
    local = seq.shard_batch(batch)
    return {name: seq.unshard(x, 1) for name, x in local.items()}


@pytest.mark.parametrize("layout", LAYOUTS, ids=id_of)
def test_labels_are_shifted_before_the_cut(layout):
    """N - 1 targets, whatever the shards: none is lost at an edge, of which zigzag has 2R."""
    ids = torch.arange(100, 124).view(2, 12)
    for whole in run_threads(_batch, layout, layout, causal(), {"input_ids": ids, "labels": ids}):
        assert torch.equal(whole["input_ids"], ids)
        assert torch.equal(whole["shift_labels"][:, :-1], ids[:, 1:])
        assert (whole["shift_labels"][:, -1] == -100).all()
        assert "labels" not in whole
        assert torch.equal(whole["position_ids"], torch.arange(12).expand(2, -1))


def test_last_tokens_of_documents_have_no_target():
    layout = Layout(ulysses_degree=2, ring_degree=2)
    ids = torch.arange(12).view(1, 12)
    mask = causal() & documents([1, 4, 7])
    whole = run_threads(_batch, layout, layout, mask, {"input_ids": ids, "labels": ids})[0]
    assert whole["shift_labels"].tolist() == [[-100, 2, 3, 4, -100, 6, 7, 8, 9, 10, 11, -100]]


def test_ignored_labels_stay_ignored_and_given_entries_are_kept():
    layout = Layout(ulysses_degree=1, ring_degree=2)
    labels = torch.full((1, 12), -100)
    labels[0, 5] = 7
    given = {
        "inputs_embeds": torch.randn(1, 12, 3),
        "labels": labels,
        "position_ids": torch.arange(12)[None] + 50,
    }
    whole = run_threads(_batch, layout, layout, causal(), given)[0]
    assert whole["shift_labels"].tolist() == [[-100] * 4 + [7] + [-100] * 7]
    assert torch.equal(whole["position_ids"], given["position_ids"])
    assert torch.equal(whole["inputs_embeds"], given["inputs_embeds"])


def _problem(groups, layout, call):
    seq = ShardedSequence(layout, groups, seq_len=12)
    ids = torch.zeros(1, 12, dtype=torch.long)
    calls = {
        "wrong length": lambda: seq.shard(ids[:, :11], 1),
        "wrong dim": lambda: seq.shard(ids, 2),
        "unshard a whole": lambda: seq.unshard(ids, 1),
        "unshard with gradient": lambda: seq.unshard(seq.shard(ids.float(), 1).requires_grad_(), 1),
        "attention mask": lambda: seq.shard_batch({"input_ids": ids, "attention_mask": ids}),
        "both labels": lambda: seq.shard_batch({"labels": ids, "shift_labels": ids}),
        "empty batch": lambda: seq.shard_batch({}),
        "short labels": lambda: seq.shard_batch({"input_ids": ids, "labels": ids[:, :5]}),
    }
    try:
        calls[call]()
    except InputError as problem:
        return str(problem)
    return None


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ("wrong length", "has 11 entries, but seq_len is 12"),
        ("wrong dim", "dim 2 is out of range"),
        ("unshard a whole", "but local_len is"),
        ("unshard with gradient", "passes no gradient"),
        ("attention mask", "does not know how to cut attention_mask"),
        ("both labels", "both labels and shift_labels"),
        ("empty batch", "empty batch"),
        ("short labels", "has 5 entries"),
    ],
)
def test_refusals(call, words):
    layout = Layout(ulysses_degree=2, ring_degree=2)
    for outcome in run_threads(_problem, layout, layout, call):
        assert outcome is not None and words in outcome


def _shard_gradient(groups, layout):
    seq = ShardedSequence(layout, groups, seq_len=10, mask=sliding_window(3, 0))
    x = torch.randn(2, 10, requires_grad=True)
    seq.shard(x, 1).sum().backward()
    expected = torch.zeros(2, 10)
    expected[:, seq.indices] = 1
    return torch.equal(x.grad, expected), repr(seq)


def test_shard_is_differentiable_and_the_sequence_says_what_it_is():
    layout = Layout(ulysses_degree=2, ring_degree=2)
    for exact, text in run_threads(_shard_gradient, layout, layout):
        assert exact and "seq_len=10" in text and "sliding_window(3, 0)" in text
