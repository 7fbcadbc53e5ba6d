"""Do the tests bite? Break one thing at a time in a copy of the tree, and see that a test fails.

    python -m tests.mutations              # all, a few minutes
    python -m tests.mutations sink         # those whose name has the word

Each mutation is a fault that some real system has had, or could have. Exit status 1 if one
survives.
"""

import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HYBRID = "tests/attention/test_hybrid.py"
EDGES = "tests/attention/test_hybrid_edges.py"


@dataclass(frozen=True)
class Mutation:
    """One fault: `old`, which stands exactly once in `file`, becomes `new`; `tests` must fail."""

    name: str
    file: str
    old: str
    new: str
    tests: str


MUTATIONS = [
    Mutation(
        "one hop's dk and dv are dropped",
        "hybridcp/attention/backward.py",
        "                dblock += arrived\n",
        "                pass\n",
        HYBRID,
    ),
    Mutation(
        "the ring's backward computes with the block of hop 0",
        "hybridcp/attention/backward.py",
        "attention.backward(dout, q, present, out, lse, step, dq, dblock)",
        "attention.backward(dout, q, kv, out, lse, step, dq, dblock)",
        HYBRID,
    ),
    Mutation(
        "a travelling gradient is summed in the input's dtype",
        "hybridcp/attention/backward.py",
        "if dblock is None and step.bands:\n            "
        "dblock = torch.zeros_like(present, dtype=dtype)",
        "if dblock is None and step.bands:\n            dblock = torch.zeros_like(present)",
        f"{EDGES} {HYBRID}",
    ),
    Mutation(
        "the block for the next step is read before it has arrived",
        "hybridcp/attention/in_flight.py",
        "            exchange.wait()\n",
        "            pass\n",
        "tests/attention/test_ring_order.py",
    ),
    Mutation(
        "the backward starts from the own block",
        "hybridcp/attention/backward.py",
        "present = present_block(blocks, t, last if t == 0 else kv)",
        "present = present_block(blocks, t, kv)",
        HYBRID,
    ),
    Mutation(
        "gradients that come home are added to the first rows",
        "hybridcp/attention/kv_block.py",
        "whole[:, a:b] += pieces[:, offset : offset + b - a]",
        "whole[:, : b - a] += pieces[:, offset : offset + b - a]",
        "tests/attention/test_product.py",
    ),
    Mutation(
        "rows are taken from the wrong place",
        "hybridcp/attention/kv_block.py",
        "torch.cat([whole[:, a:b] for a, b in rows], dim=1, out=part)",
        "torch.cat([whole[:, : b - a] for a, b in rows], dim=1, out=part)",
        "tests/attention/test_pieces.py",
    ),
    Mutation(
        "merging has the wrong sign",
        "hybridcp/attention/online_softmax.py",
        "torch.exp(partial_lse - merged)",
        "torch.exp(merged - partial_lse)",
        "tests/attention/test_pieces.py",
    ),
    Mutation(
        "merging by log(1 + exp) overflows",
        "hybridcp/attention/online_softmax.py",
        "torch.logaddexp(lse, partial_lse)",
        "lse + torch.log(1 + torch.exp(partial_lse - lse))",
        "tests/attention/test_pieces.py",
    ),
    Mutation(
        "the output is accumulated in the input's dtype",
        "hybridcp/attention/online_softmax.py",
        "        dtype = accumulator_dtype(q.dtype)\n",
        "        dtype = q.dtype\n",
        "tests/attention/test_pieces.py",
    ),
    Mutation(
        "gradients of a shared key/value head are not summed",
        "hybridcp/attention/ulysses.py",
        "dk[:, :, keys.start : keys.stop] += of_k",
        "dk[:, :, keys.start : keys.stop] = of_k",
        "tests/attention/test_pieces.py",
    ),
    Mutation(
        "gradients of a repeated head are overwritten",
        "hybridcp/attention/block.py",
        "accumulator[:, piece.k_rows, head] += gradient[:, :, i]",
        "accumulator[:, piece.k_rows, head] = gradient[:, :, i]",
        HYBRID,
    ),
    Mutation(
        "query heads are paired with the wrong key/value heads",
        "hybridcp/attention/heads.py",
        "range(q[0] // group, q[-1] // group + 1)",
        "range(q[0] % self.kv_heads, q[0] % self.kv_heads + len(q) // group + (len(q) < group))",
        "tests/attention/test_pieces.py",
    ),
    Mutation(
        "sinks do not scale the output",
        "hybridcp/attention/sinks.py",
        "    running.out *= torch.exp(running.lse - lse).transpose(1, 2).unsqueeze(-1)\n",
        "",
        "tests/attention/test_pieces.py",
    ),
    Mutation(
        "the gradient of sinks has the wrong sign",
        "hybridcp/attention/sinks.py",
        "return -(torch.exp(sinks",
        "return (torch.exp(sinks",
        "tests/attention/test_product.py",
    ),
    Mutation(
        "softcap has no derivative",
        "hybridcp/kernels/reference.py",
        "            ds *= 1 - (s / scores.softcap)",
        "            ds *= 1 - 0 * (s / scores.softcap)",
        "tests/kernels/test_kernels.py",
    ),
    Mutation(
        "a window of the CPU kernel is off by one",
        "hybridcp/kernels/cpu_tiles.py",
        "    corner = band.q0 + band.hi\n",
        "    corner = band.q0 + band.hi + 1\n",
        "tests/kernels/test_cpu_tiles.py",
    ),
    Mutation(
        "the backward ring begins with the own block",
        "hybridcp/rings.py",
        "owner = self._at(outer + 1 + c, inner + 1 + s)",
        "owner = self._at(outer + c, inner + s)",
        "tests/test_proof.py",
    ),
    Mutation(
        "the outer hop of a double ring is due one step early",
        "hybridcp/rings.py",
        "            due = t + self.inner\n            if s == 0 and due < self.degree:",
        "            due = t + self.inner - 1\n            if s == 0 and due < self.degree:",
        "tests/test_proof.py",
    ),
    Mutation(
        "one position's share of a gathered gradient is left out",
        "hybridcp/attention/gathered.py",
        "for share in shares.view(ring.size, kv.numel()):",
        "for share in shares.view(ring.size, kv.numel())[:-1]:",
        "tests/attention/test_exchanges.py",
    ),
    Mutation(
        "the direct exchange sends one row too few",
        "hybridcp/schedule.py",
        "seen.setdefault(other, []).append((piece.q0, piece.q1))",
        "seen.setdefault(other, []).append((piece.q0, max(piece.q1 - 1, piece.q0 + 1)))",
        "tests/test_proof.py",
    ),
    Mutation(
        "a window is shifted by one",
        "hybridcp/masks.py",
        "lo = -left if left >= 0 else -UNBOUNDED",
        "lo = -left - 1 if left >= 0 else -UNBOUNDED",
        "tests/test_masks.py",
    ),
    Mutation(
        "labels are not shifted",
        "hybridcp/sequence.py",
        "shifted[:, :-1] = labels[:, 1:]",
        "shifted[:, :-1] = labels[:, :-1]",
        "tests/test_sequence.py",
    ),
    Mutation(
        "positions do not start again in a document",
        "hybridcp/sequence.py",
        "return self.indices - starts[document]",
        "return self.indices",
        "tests/test_sequence.py",
    ),
    Mutation(
        "tokens are cut by the Ulysses rank first",
        "hybridcp/sequence.py",
        "return self.schedule.sharding.rank_ranges(ring_rank, ulysses_rank) or ((0, 0),)",
        "return self.schedule.sharding.rank_ranges(ulysses_rank % self.layout.ring_degree, "
        "ring_rank % self.layout.ulysses_degree) or ((0, 0),)",
        "tests/test_sequence.py",
    ),
    Mutation(
        "gradients are averaged over the ranks",
        "hybridcp/training/gradients.py",
        "        communicator.all_reduce(total)\n",
        "        communicator.all_reduce(total)\n        total = total / communicator.size\n",
        "tests/training",
    ),
    Mutation(
        "ranks with different dtypes do not notice",
        "hybridcp/attention/hybrid.py",
        '            "dtype": q.dtype,\n',
        "",
        "tests/attention/test_agreement.py",
    ),
    Mutation(
        "a mask that differs between ranks is not noticed",
        "hybridcp/sequence.py",
        "edges = chain.from_iterable(self.schedule.bands)",
        "edges = [0]",
        "tests/attention/test_agreement.py",
    ),
]


def survives(mutation: Mutation, copy: Path) -> bool:
    """Whether the mutated tree passes its tests."""
    file = copy / mutation.file
    text = file.read_text(encoding="utf-8")
    assert text.count(mutation.old) == 1, f"{mutation.name}: {mutation.file} has changed"
    file.write_text(text.replace(mutation.old, mutation.new), encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, *mutation.tests.split()],
        cwd=copy,
        capture_output=True,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"},
    )
    file.write_text(text, encoding="utf-8")
    # 1 is pytest's status for failed tests, negative a process that died (as ranks do that send
    # messages of different sizes); anything else ran none.
    assert done.returncode <= 1, done.stdout.decode()
    return done.returncode == 0


def main(words: list[str]) -> int:
    """Try the mutations whose name has all the words."""
    chosen = [m for m in MUTATIONS if all(word in m.name for word in words)]
    alive = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "tree"
        ignored = shutil.ignore_patterns(".*", "__pycache__", "build")
        shutil.copytree(ROOT, copy, ignore=ignored)
        for mutation in chosen:
            survived = survives(mutation, copy)
            alive += survived
            print(f"{'SURVIVED' if survived else 'caught  '}  {mutation.name}", flush=True)
    print(f"{len(chosen) - alive} of {len(chosen)} caught")
    return 1 if alive else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
