"""Dense float64 attention, and the merging of a kernel's pieces: what kernels are tested with."""

import itertools
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from hybridcp.kernels.protocol import Partial, PartialGradients, Scores
from hybridcp.masks import UNBOUNDED, Band


@dataclass(frozen=True)
class Case:
    """One block of attention: (B, S, H, D) tensors, the last dim of v and dout Dv, and bands."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor
    bands: tuple[Band, ...]
    scores: Scores

    @property
    def allowed(self) -> torch.Tensor:
        return dense_mask(self.bands, self.q.shape[1], self.k.shape[1])


def make_case(
    bands: Iterable[Band],
    q_len: int,
    k_len: int,
    *,
    batch: int = 1,
    heads: int = 2,
    kv_heads: int = 2,
    head_dim: int = 8,
    value_dim: int | None = None,
    softcap: float = 0.0,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    logit_gain: float = 1.0,
) -> Case:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    return Case(
        q=normal(batch, q_len, heads, head_dim) * logit_gain,
        k=normal(batch, k_len, kv_heads, head_dim),
        v=normal(batch, k_len, kv_heads, value_dim or head_dim),
        dout=normal(batch, q_len, heads, value_dim or head_dim),
        bands=tuple(bands),
        scores=Scores(0.8 * head_dim**-0.5, softcap),  # not the operators' default scale
    )


def dense_mask(bands: Iterable[Band], q_len: int, k_len: int) -> torch.Tensor:
    """(Sq, Sk) bool, and a check that no pair is in two bands."""
    count = torch.zeros(q_len, k_len, dtype=torch.int64)
    queries, keys = torch.arange(q_len)[:, None], torch.arange(k_len)
    for band in bands:
        inside = (queries >= band.q0) & (queries < band.q1) & (keys >= band.k0) & (keys < band.k1)
        count += inside & (keys - queries >= band.lo) & (keys - queries <= band.hi)
    assert count.max() <= 1
    return count.bool()


def dense_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, allowed: torch.Tensor, scores: Scores
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output (B, Sq, H, D) and torch.logsumexp (B, H, Sq); rows without a key: 0 and -inf."""
    groups = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(groups, 2), v.repeat_interleave(groups, 2)
    s = torch.einsum("bqhd,bshd->bhqs", q, k) * scores.softmax_scale
    if scores.softcap:
        s = scores.softcap * (s / scores.softcap).tanh()
    s = s.masked_fill(~allowed, -torch.inf)
    p = s.softmax(-1).masked_fill(~allowed.any(-1)[:, None], 0)
    return torch.einsum("bhqs,bshd->bqhd", p, v), s.logsumexp(-1)


def dense_gradients(case: Case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dq, dk, dv) by float64 autograd."""
    q, k, v = (x.double().requires_grad_() for x in (case.q, case.k, case.v))
    out, _ = dense_attention(q, k, v, case.allowed, case.scores)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), case.dout.double())
    return dq, dk, dv


def merge(partials: Iterable[Partial], case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """Online softmax over pieces, in float64: (out, lse) of all rows."""
    q = case.q
    out = torch.zeros(case.dout.shape, dtype=torch.float64)
    lse = torch.full((q.shape[0], q.shape[2], q.shape[1]), -torch.inf, dtype=torch.float64)
    for partial in partials:
        rows = partial.rows
        merged = torch.logaddexp(lse[:, :, rows], partial.lse.double())
        kept = (lse[:, :, rows] - merged).exp().transpose(1, 2)[..., None]
        added = (partial.lse.double() - merged).exp().transpose(1, 2)[..., None]
        out[:, rows] = out[:, rows] * kept + partial.out.double() * added
        lse[:, :, rows] = merged
    return out, lse


def add_up(
    pieces: Iterable[PartialGradients], case: Case
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dq, dk, dv) in float64."""
    dq, dk, dv = (torch.zeros(x.shape, dtype=torch.float64) for x in (case.q, case.k, case.v))
    for piece in pieces:
        dq[:, piece.q_rows] += piece.dq.double()
        dk[:, piece.k_rows] += piece.dk.double()
        dv[:, piece.k_rows] += piece.dv.double()
    return dq, dk, dv


def random_bands(rng: random.Random, q_len: int, k_len: int) -> tuple[Band, ...]:
    """Trimmed, disjoint bands: rectangles of a random grid, cut by random diagonals."""

    def cuts(length: int) -> list[int]:
        inner = [rng.randint(0, length) for _ in range(rng.randint(0, 2))]
        return sorted({0, length, *inner})

    q_cuts, k_cuts = cuts(q_len), cuts(k_len)
    bands = []
    for q0, q1 in itertools.pairwise(q_cuts):
        for k0, k1 in itertools.pairwise(k_cuts):
            corner = k0 - q0
            lo, hi = sorted(corner + rng.randint(q0 - q1, k1 - k0) for _ in range(2))
            lo = rng.choice([-UNBOUNDED, lo])
            hi = rng.choice([UNBOUNDED, hi])
            band = Band(q0, q1, k0, k1, lo, hi).trimmed()
            if band is not None and rng.random() < 0.8:
                bands.append(band)
    return tuple(bands)


def key_blocks(
    rng: random.Random, bands: Sequence[Band], k_len: int, blocks: int
) -> list[tuple[Band, ...]]:
    """The bands cut into `blocks` random ranges of keys, as a ring step sees them."""
    edges = sorted({0, k_len, *(rng.randint(0, k_len) for _ in range(blocks - 1))})
    rows = max(band.q1 for band in bands)
    return [
        tuple(
            piece
            for band in bands
            if (piece := band.intersect(Band(0, rows, start, stop))) is not None
        )
        for start, stop in itertools.pairwise(edges)
    ]


def relative_error(actual: torch.Tensor, expected: torch.Tensor, floor: float = 0.0) -> float:
    """Frobenius norm of the difference by the norm of what was expected.

    `floor` is the least size an element counts as: gradients that cancel to 0 (one key a row)
    keep the rounding of what cancelled.
    """
    expected = expected.double()
    norm = max(float(expected.norm()), floor * expected.numel() ** 0.5, 1e-30)
    return float((actual.double() - expected).norm()) / norm
