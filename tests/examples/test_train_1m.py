"""Training: the same losses, gradients and weights for every layout, and one line for a mistake."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import train_1m
from decoder import Decoder, DecoderConfig
from options import TrainConfig, read_options
from text_corpus import load_corpus
from torch import nn

import hybridcp
from hybridcp import Layout, causal, documents
from hybridcp.errors import InputError
from hybridcp.testing import DistributedTestError

SCRIPT = Path(train_1m.__file__)
SEQ_LEN = 61
LAYOUTS = [(1, 1), (2, 1), (1, 2), (2, 2), (4, 1), (1, 4)]
CONFIG = TrainConfig(
    model=DecoderConfig(layers=2, dim=32, heads=4, kv_heads=2),
    layout=Layout(ulysses_degree=1, ring_degree=1),
    mask=causal(),
    seq_len=SEQ_LEN,
    steps=3,
    lr=1e-2,
)


def mesh_of(config):
    if config.layout.cp_degree == 1:
        return train_1m.one_process()
    return hybridcp.init_mesh(config.layout, device_type="cpu")


def with_layout(degrees, **changes):
    layout = Layout(ulysses_degree=degrees[0], ring_degree=degrees[1])
    return replace(CONFIG, layout=layout, **changes)


def train(config):
    """Losses and weights of one rank."""
    training = train_1m.start(config, mesh_of(config))
    losses = train_1m.train(training, load_corpus())
    return losses, training.model.state_dict()


@pytest.fixture(scope="module")
def one_process_losses():
    losses, _ = train(CONFIG)
    return losses


@pytest.mark.parametrize("degrees", LAYOUTS, ids=[f"ulysses{u}-ring{r}" for u, r in LAYOUTS])
def test_losses_agree_step_by_step(run_distributed, one_process_losses, degrees):
    config = with_layout(degrees)
    results = run_distributed(train, config.layout.cp_degree, config)
    for losses, weights in results:
        assert losses == pytest.approx(one_process_losses, abs=1e-4)
        assert losses == results[0][0], "ranks report different losses"
        for name, weight in weights.items():
            assert torch.equal(weight, results[0][1][name]), f"{name} differs over ranks"


def gradients(config):
    training = train_1m.start(config, mesh_of(config))
    tokens = load_corpus().sample(SEQ_LEN, seed=0, step=0)
    loss = train_1m.loss_and_gradients(training, tokens)
    return loss.item(), {n: w.grad for n, w in training.model.named_parameters()}


class PlainAttention(nn.Module):
    """torch's own attention over a whole sequence of packed documents."""

    def __init__(self, lengths):
        super().__init__()
        self.lengths = lengths

    def forward(self, q, k, v, seq):
        pieces = [
            F.scaled_dot_product_attention(*parts, is_causal=True, enable_gqa=True)
            for parts in zip(
                *(x.transpose(1, 2).split(self.lengths, 2) for x in (q, k, v)), strict=True
            )
        ]
        return torch.cat(pieces, 2).transpose(1, 2)


def reference_gradients(lengths):
    """Loss and gradients without anything of the library."""
    model = Decoder(CONFIG.model, PlainAttention(lengths), seed=CONFIG.seed)
    tokens = load_corpus().sample(SEQ_LEN, seed=0, step=0)
    documents = tokens.split(lengths, 1)
    labels = torch.cat([F.pad(piece[:, 1:], (0, 1), value=-100) for piece in documents], 1)
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    logits = F.linear(model(tokens, positions, None), model.output_weight)
    loss = F.cross_entropy(logits[0], labels[0])
    loss.backward()
    return loss.item(), {n: w.grad for n, w in model.named_parameters()}


@pytest.mark.parametrize("degrees", LAYOUTS, ids=[f"ulysses{u}-ring{r}" for u, r in LAYOUTS])
@pytest.mark.parametrize("lengths", [[61], [1, 20, 33, 7]], ids=["causal", "documents"])
def test_gradients_equal_plain_pytorch(run_distributed, degrees, lengths):
    mask = causal() if len(lengths) == 1 else causal() & documents(lengths)
    config = with_layout(degrees, mask=mask, checkpoint_activations=len(lengths) > 1)
    loss, wanted = reference_gradients(lengths)
    for got_loss, got in run_distributed(gradients, config.layout.cp_degree, config):
        assert got_loss == pytest.approx(loss, rel=1e-6)
        for name, gradient in wanted.items():
            ratio = got[name].norm() / gradient.norm()
            assert ratio.item() == pytest.approx(1, abs=1e-5), name
            assert (got[name] - gradient).norm() < 1e-5 * gradient.norm(), name


class RankCorpus:
    """A faulty corpus: another sample on each rank."""

    def sample(self, seq_len, *, seed, step):
        return torch.full((1, seq_len), dist.get_rank())


def train_on_different_samples(config):
    train_1m.train(train_1m.start(config, mesh_of(config)), RankCorpus())


def test_refuses_different_samples_on_ranks(run_distributed):
    with pytest.raises(DistributedTestError, match="different samples"):
        run_distributed(train_on_different_samples, 2, with_layout((1, 2)))


def test_default_options_are_those_of_the_documentation():
    options = read_options([])
    assert options.config.seq_len == 16384
    assert options.config.layout.cp_degree == 1
    assert options.config.model == DecoderConfig()
    assert "Best:" in options.origin


def test_layout_file(tmp_path):
    Layout(ulysses_degree=1, ring_degree=1, sharding="contiguous").save(tmp_path / "layout.yaml")
    options = read_options(["--seq-len", "1k", "--layout", str(tmp_path / "layout.yaml")])
    assert options.config.layout.sharding == "contiguous"


MISTAKES = [
    (["--seq-len", "12x"], "--seq-len must be a whole number of tokens"),
    (["--seq-len", "1G"], "fewer than the sequence length"),
    (["--steps", "0"], "--steps must be at least 1"),
    (["--steps", "many"], "argument --steps: invalid int value"),
    (["--lr", "nan"], "--lr must be a positive number"),
    (["--seed", "-1"], "--seed must be at least 0"),
    (["--mask", "casual"], "cannot read 'casual'"),
    (["--mask", "documents:4k", "--seq-len", "8k"], "sum to 4096"),
    (["--heads", "3"], "heads must be a multiple of kv_heads"),
    (["--ulysses", "2", "--ring", "1"], "but the group has 1 ranks"),
    (["--ulysses", "2"], "--ulysses and --ring go together"),
    (["--ring", "0", "--ulysses", "1"], "ring_degree"),
    (["--layout", "missing.yaml"], "missing.yaml"),
    (["--layout", "a.yaml", "--ring", "1"], "give either --layout or"),
    (["--data", "missing.txt"], "cannot read missing.txt"),
    (["--json-log", "missing/log.jsonl"], "--json-log: cannot write"),
    (["--frobnicate"], "unrecognized arguments: --frobnicate; see --help"),
]


@pytest.mark.parametrize(("arguments", "message"), MISTAKES, ids=[" ".join(a) for a, _ in MISTAKES])
def test_a_mistake_is_one_line_and_status_2(monkeypatch, capsys, arguments, message):
    monkeypatch.setattr(sys, "argv", ["train_1m.py", *arguments])
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert train_1m.main() == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert message in shown.err
    assert shown.err.startswith("error: ")
    assert shown.err.count("\n") == 1


def test_only_the_first_rank_of_a_machine_shows_a_mistake(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["train_1m.py", "--steps", "0"])
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(train_1m.time, "sleep", lambda _: None)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert train_1m.main() == 2
    assert capsys.readouterr().err == ""


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_asking_for_a_missing_gpu():
    with pytest.raises(InputError, match="use --device cpu"):
        read_options(["--device", "cuda"])


def run(*command):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(SCRIPT.parents[1])}
    return subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True, timeout=100
    )


def test_a_bad_file_ends_the_program_with_status_2(tmp_path):
    (tmp_path / "image.txt").write_bytes(bytes(range(256)))
    finished = run(str(SCRIPT), "--data", str(tmp_path / "image.txt"))
    assert finished.returncode == 2
    assert finished.stderr.count("\n") == 1
    assert "image.txt is not text" in finished.stderr


def test_two_processes_from_the_command_line(tmp_path):
    log = tmp_path / "log.jsonl"
    finished = run(
        *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(SCRIPT)),
        *("--seq-len", "100", "--steps", "2", "--dim", "32", "--ulysses", "1", "--ring", "2"),
        *("--device", "cpu", "--dtype", "fp32", "--compare", "--json-log", str(log)),
    )
    assert finished.returncode == 0, finished.stderr
    assert finished.stderr == ""
    assert finished.stdout.count("step 2/2") == 2
    assert "Ulysses 1 × Ring 2" in finished.stdout
    assert "kernel   cpu: " in finished.stdout
    difference = float(finished.stdout.rpartition("largest difference ")[2])
    assert difference < 1e-4
    steps = [json.loads(line) for line in log.read_text().splitlines()]
    assert [step["step"] for step in steps] == [0, 1]
    assert all(step["tokens_per_s"] > 0 and step["peak_memory_gib"] > 0 for step in steps)
