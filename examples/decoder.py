"""A compact decoder on sequence shards: RMSNorm, RoPE, grouped queries, SwiGLU, tied output.

    model = Decoder(config, HybridAttention(layout, mesh), seed=0)
    hidden = model(input_ids, position_ids, seq)        # (B, L) each → (B, L, dim)
    logits = F.linear(hidden, model.output_weight)      # better: training.linear_cross_entropy

L is this rank's number of tokens. Attention is the only layer that sees other ranks; everything
else works token by token and needs no change. Two things do: positions are those of the whole
sequence, and the attention module takes the sequence.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from hybridcp import HybridAttention, ShardedSequence
from hybridcp.errors import InputError


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes of the model.

    Raises:
        InputError: sizes that do not fit each other.
    """

    vocab_size: int = 256
    layers: int = 2
    dim: int = 128
    heads: int = 4
    kv_heads: int = 2
    rope_base: float = 500_000.0

    def __post_init__(self) -> None:
        for name in ("vocab_size", "layers", "dim", "heads", "kv_heads"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.heads % self.kv_heads or self.dim % (2 * self.heads):
            raise InputError(
                f"heads must be a multiple of kv_heads and dim of 2 × heads (rotary positions turn "
                f"pairs), got dim {self.dim}, {self.heads} heads, {self.kv_heads} kv_heads"
            )

    @property
    def head_dim(self) -> int:
        """Size of one head."""
        return self.dim // self.heads

    @property
    def ffn_dim(self) -> int:
        """About 8/3 · dim, as SwiGLU has three matrices where an MLP has two."""
        return -(-8 * self.dim // 3 // 32) * 32


class Linear(nn.Linear):
    """No bias; float32 weights, used in the activations' dtype."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(…, inputs) → (…, outputs)."""
        return F.linear(x, self.weight.to(x.dtype))


class Attention(nn.Module):
    """Rotary grouped-query attention over the whole sequence."""

    def __init__(self, config: DecoderConfig, attention: HybridAttention) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.to_q = Linear(config.dim, config.heads * self.head_dim)
        self.to_k = Linear(config.dim, config.kv_heads * self.head_dim)
        self.to_v = Linear(config.dim, config.kv_heads * self.head_dim)
        self.to_out = Linear(config.heads * self.head_dim, config.dim)
        self.attention = attention

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], seq: ShardedSequence) -> Tensor:
        """(B, L, dim) → (B, L, dim). A collective."""
        q, k, v = (
            project(x).unflatten(-1, (-1, self.head_dim))  # (B, L, heads, head_dim)
            for project in (self.to_q, self.to_k, self.to_v)
        )
        q, k = rotate(norm(q), rotation), rotate(norm(k), rotation)
        return self.to_out(self.attention(q, k, v, seq).flatten(-2))


class SwiGLU(nn.Module):
    """The gated MLP."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.gate = Linear(config.dim, config.ffn_dim)
        self.up = Linear(config.dim, config.ffn_dim)
        self.down = Linear(config.ffn_dim, config.dim)

    def forward(self, x: Tensor) -> Tensor:
        """(B, L, dim) → (B, L, dim)."""
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Attention and MLP, each added to the residual stream."""

    def __init__(self, config: DecoderConfig, attention: HybridAttention) -> None:
        super().__init__()
        self.attention = Attention(config, attention)
        self.mlp = SwiGLU(config)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], seq: ShardedSequence) -> Tensor:
        """(B, L, dim) → (B, L, dim). A collective."""
        x = x + self.attention(norm(x), rotation, seq)
        return x + self.mlp(norm(x))


class Decoder(nn.Module):
    """The model up to the last hidden states; `output_weight` makes logits of them.

    Args:
        config: sizes.
        attention: one module serves all layers.
        seed: of the initial weights, which do not depend on rank or layout.
        dtype: of the activations; weights are float32.
        checkpoint_activations: keep each block's input and attention result only, and compute the
            rest again in the backward; ring attention and its messages are not paid for twice.
    """

    def __init__(
        self,
        config: DecoderConfig,
        attention: HybridAttention,
        *,
        seed: int,
        dtype: torch.dtype = torch.float32,
        checkpoint_activations: bool = False,
    ) -> None:
        super().__init__()
        self.config = config
        self.dtype = dtype
        self.checkpoint_activations = checkpoint_activations
        self.embedding = nn.Embedding(config.vocab_size, config.dim)
        self.blocks = nn.ModuleList(Block(config, attention) for _ in range(config.layers))
        self.reset_parameters(seed)

    @property
    def output_weight(self) -> Tensor:
        """(vocab_size, dim), tied to the embedding."""
        return self.embedding.weight

    @torch.no_grad()
    def reset_parameters(self, seed: int) -> None:
        """Draw the weights on the CPU, in one order, so that every rank has the same."""
        generator = torch.Generator().manual_seed(seed)
        for name, weight in self.named_parameters():
            # What is added to the residual stream starts small: 2 · layers terms add up.
            added = name.endswith(("to_out.weight", "down.weight"))
            std = 0.02 / (2 * self.config.layers) ** 0.5 if added else 0.02
            weight.copy_(torch.randn(weight.shape, generator=generator) * std)

    def forward(self, input_ids: Tensor, position_ids: Tensor, seq: ShardedSequence) -> Tensor:
        """(B, L) tokens and their positions → (B, L, dim) last hidden states. A collective."""
        rotation = rope(position_ids, self.config, self.dtype)
        x = self.embedding(input_ids).to(self.dtype)
        for block in self.blocks:
            if self.checkpoint_activations and torch.is_grad_enabled():
                x = checkpoint(
                    block, x, rotation, seq, use_reentrant=False, context_fn=_keep_attention
                )
            else:
                x = block(x, rotation, seq)
        return norm(x)


def norm(x: Tensor) -> Tensor:
    """RMSNorm without weights over the last dim."""
    return F.rms_norm(x, (x.size(-1),))


def rope(position_ids: Tensor, config: DecoderConfig, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine, (B, L, 1, head_dim / 2), of the angles of global positions."""
    half = torch.arange(config.head_dim // 2, device=position_ids.device, dtype=torch.float64)
    # In float32 the angles of position 1M would be off by up to 0.02 radians.
    angle = position_ids[..., None, None] * config.rope_base ** (-2 * half / config.head_dim)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Turn the pairs (i, i + head_dim / 2) of x (B, L, heads, head_dim) by their angles."""
    cos, sin = rotation
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


def _keep_attention() -> Any:
    return create_selective_checkpoint_contexts(_policy)


def _policy(_: Any, operator: Callable[..., Any], *args: Any, **kwargs: Any) -> CheckpointPolicy:
    if operator == torch.ops.hybridcp.ring_attention.default:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE
