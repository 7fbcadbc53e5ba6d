"""The loss and the gradients of shards add up to those of one process, whatever each rank holds."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import hybridcp
from hybridcp import Layout, ShardedSequence, causal, documents
from hybridcp.errors import InputError
from hybridcp.testing import DistributedTestError
from hybridcp.training import (
    count_targets,
    linear_cross_entropy,
    loss_share,
    sum_gradients,
    sum_over_ranks,
)

VOCABULARY, WIDTH = 11, 6
LAYOUTS = [(1, 1), (2, 1), (1, 2), (2, 2), (4, 1), (1, 4)]
layouts = pytest.mark.parametrize(
    "degrees", LAYOUTS, ids=[f"ulysses{u}-ring{r}" for u, r in LAYOUTS]
)


def model():
    """Token by token, so that no attention is needed to compare losses."""
    torch.manual_seed(0)
    return nn.ParameterDict(
        {
            "embedding": nn.Parameter(torch.randn(VOCABULARY, WIDTH)),
            "output": nn.Parameter(torch.randn(VOCABULARY, WIDTH)),
            "unused": nn.Parameter(torch.randn(3)),
            "frozen": nn.Parameter(torch.randn(2), requires_grad=False),
        }
    )


def tokens(seq_len):
    return torch.randint(VOCABULARY, (1, seq_len), generator=torch.Generator().manual_seed(2))


def whole(batches, mask_lengths=None):
    """Loss, gradients and targets of one process, by other means; targets given as labels."""
    parameters = model()
    targets = torch.cat([shift(labels, mask_lengths) for _, labels in batches], 1)
    hidden = F.embedding(torch.cat([ids for ids, _ in batches], 1), parameters["embedding"])
    logits = F.linear(hidden, parameters["output"])[0]
    F.cross_entropy(logits, targets[0]).backward()
    per_token = F.cross_entropy(logits.detach(), targets[0], reduction="none")
    return per_token, {name: p.grad for name, p in parameters.items()}, targets


def shift(labels, lengths):
    pieces = labels.split(lengths or labels.size(1), 1)
    return torch.cat([F.pad(piece[:, 1:], (0, 1), value=-100) for piece in pieces], 1)


def sharded(degrees, batches, mask=None):
    """Loss, gradients, count and per-token losses of one rank of a layout."""
    layout = Layout(ulysses_degree=degrees[0], ring_degree=degrees[1])
    mesh = hybridcp.init_mesh(layout, device_type="cpu")
    return sharded_on(layout, mesh, batches, mask)


def sharded_on(layout, mesh, batches, mask=None):
    parameters = model()
    parts = []
    for ids, labels in batches:
        seq = ShardedSequence(layout, mesh, seq_len=ids.size(1), mask=mask or causal())
        parts.append((seq, seq.shard_batch({"input_ids": ids, "labels": labels})))
    groups = parts[0][0].groups
    count = sum(count_targets(batch["shift_labels"], groups) for _, batch in parts)
    loss, per_token = torch.zeros(()), []
    for seq, batch in parts:
        hidden = F.embedding(batch["input_ids"], parameters["embedding"])
        labels = batch["shift_labels"]
        share = loss_share(linear_cross_entropy(hidden, parameters["output"], labels), count)
        share.backward()
        loss += share.detach()
        each = [
            linear_cross_entropy(hidden[:, i : i + 1], parameters["output"], labels[:, i : i + 1])
            for i in range(seq.local_len)
        ]
        each = torch.stack(each).detach() if each else torch.zeros(0)
        per_token.append(seq.unshard(each, dim=0))
    sum_gradients(parameters.values(), groups)
    gradients = {name: p.grad for name, p in parameters.items()}
    return sum_over_ranks(loss, groups).item(), gradients, count.item(), torch.cat(per_token)


def assert_equal_to_one_process(results, batches, mask_lengths=None):
    per_token, gradients, targets = whole(batches, mask_lengths)
    count = int((targets != -100).sum())
    for loss, got, got_count, got_per_token in results:
        assert got_count == count
        assert loss == pytest.approx(per_token.sum().item() / count, rel=1e-6)
        torch.testing.assert_close(got_per_token, per_token)
        for name in ("embedding", "output"):
            torch.testing.assert_close(got[name], gradients[name], rtol=1e-5, atol=1e-7)
        assert torch.equal(got["unused"], torch.zeros(3))
        assert got["frozen"] is None
        for name in ("embedding", "output"):
            assert torch.equal(got[name], results[0][1][name]), "not bit-equal over ranks"


def run(run_distributed, degrees, batches, mask=None):
    return run_distributed(sharded, degrees[0] * degrees[1], degrees, batches, mask)


@layouts
def test_every_target_counts_once(run_distributed, degrees):
    batches = [(tokens(16), tokens(16))]
    results = run(run_distributed, degrees, batches)
    assert {count for _, _, count, _ in results} == {15}
    assert_equal_to_one_process(results, batches)


@layouts
def test_uneven_shards(run_distributed, degrees):
    batches = [(tokens(13), tokens(13))]
    assert_equal_to_one_process(run(run_distributed, degrees, batches), batches)


@layouts
def test_documents_have_no_target_at_their_ends(run_distributed, degrees):
    lengths = [1, 6, 2, 8]
    batches = [(tokens(17), tokens(17))]
    results = run(run_distributed, degrees, batches, causal() & documents(lengths))
    assert {count for _, _, count, _ in results} == {13}
    assert_equal_to_one_process(results, batches, lengths)


@pytest.mark.parametrize("degrees", [(2, 2), (1, 4)], ids=["ulysses2-ring2", "ring4"])
def test_a_rank_without_targets_takes_part(run_distributed, degrees):
    labels = tokens(16)
    labels[:, 3:] = -100
    batches = [(tokens(16), labels)]
    results = run(run_distributed, degrees, batches)
    assert results[0][2] == 2
    assert_equal_to_one_process(results, batches)


@pytest.mark.parametrize("degrees", [(2, 2), (1, 4)], ids=["ulysses2-ring2", "ring4"])
def test_a_rank_without_tokens_takes_part(run_distributed, degrees):
    batches = [(tokens(3), tokens(3))]
    assert_equal_to_one_process(run(run_distributed, degrees, batches), batches)


@pytest.mark.parametrize("degrees", [(1, 1), (2, 1), (2, 2)], ids=["1", "2", "4"])
def test_micro_batches_weigh_by_their_targets(run_distributed, degrees):
    few = tokens(14)
    few[:, 4:] = -100
    batches = [(tokens(14), few), (tokens(14), tokens(14))]
    results = run(run_distributed, degrees, batches)
    assert results[0][2] == 3 + 13
    assert_equal_to_one_process(results, batches)


def test_no_target_anywhere(run_distributed):
    batches = [(tokens(16), torch.full((1, 16), -100))]
    for loss, gradients, count, _ in run(run_distributed, (2, 2), batches):
        assert (loss, count) == (0, 0)
        for name in ("embedding", "output", "unused"):
            assert torch.equal(gradients[name], torch.zeros_like(gradients[name]))


def on_two_groups():
    """Two replicas of two ranks, with other data each; the second has no global rank 0."""
    world = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    layout = Layout(ulysses_degree=1, ring_degree=2)
    mesh = hybridcp.init_mesh(layout, world)
    ids = tokens(12).roll(dist.get_rank() // 2, 1)
    return sharded_on(layout, mesh, [(ids, ids)])


def test_sums_stay_within_a_context_parallel_group(run_distributed):
    results = run_distributed(on_two_groups, 4)
    for replica in (0, 1):
        ids = tokens(12).roll(replica, 1)
        assert_equal_to_one_process(results[2 * replica : 2 * replica + 2], [(ids, ids)])


def sum_16_bit():
    layout = Layout(ulysses_degree=1, ring_degree=4)
    mesh = hybridcp.init_mesh(layout, device_type="cpu")
    seq = ShardedSequence(layout, mesh, seq_len=4)
    weight = nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
    other = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    # In bf16, 256 + 1 is 256.
    weight.grad = torch.full_like(weight, 256.0 if dist.get_rank() == 0 else 1.0)
    other.grad = torch.full_like(other, 1e-9)
    sum_gradients([weight, other], seq.groups)
    return weight.grad.float(), other.grad


def test_16_bit_gradients_are_summed_in_float32(run_distributed):
    for weight, other in run_distributed(sum_16_bit, 4):
        assert torch.equal(weight, torch.full((2,), 260.0))
        assert torch.equal(other, torch.full((1,), 4e-9, dtype=torch.float64))


def sum_sparse():
    layout = Layout(ulysses_degree=1, ring_degree=2)
    mesh = hybridcp.init_mesh(layout, device_type="cpu")
    table = nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    sum_gradients(table.parameters(), ShardedSequence(layout, mesh, seq_len=4).groups)


def test_refuses_sparse_gradients(run_distributed):
    with pytest.raises(DistributedTestError, match="sparse"):
        run_distributed(sum_sparse, 2)
    assert issubclass(InputError, ValueError)
