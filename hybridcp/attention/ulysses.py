"""The two Ulysses transposes: sequence shards to head shards and back, one All-to-All each.

One worked case, B = 1, H = 8 query heads, K = 2 key/value heads, U = 4, ring position of S = 16
tokens (DeepSpeed Ulysses, arXiv 2309.14509, section 3):

                     before: sequence shard     after: head shard
    q                (1, 4, 8, D)               (1, 16, 2, D)
    k, v             (1, 4, 2, D) each          (1, 16, 1, D) each: ranks 0, 1 hold head 0

q, k and v travel packed in one message. On the wire rows come first, so what arrives from the
ranks in turn is already one array of all rows, whatever their lengths.

Shapes: B batch, S rows of the ring position, L rows of this rank, H/K query/key-value heads of
all ranks, h/n those of this rank, D head dim.
"""

from collections.abc import Iterator, Sequence

import torch
from einops import rearrange

from hybridcp.attention.heads import HeadSplit
from hybridcp.attention.online_softmax import accumulator_dtype
from hybridcp.distributed import Communicator


def gather_seq_scatter_heads_qkv(
    q_BLHD: torch.Tensor,
    k_BLKD: torch.Tensor,
    v_BLKD: torch.Tensor,
    split: HeadSplit,
    rank_lens: Sequence[int],
    ulysses: Communicator,
) -> tuple[torch.Tensor, torch.Tensor]:
    """All heads of this rank's rows → this rank's heads of all rows.

    Args:
        q_BLHD, k_BLKD, v_BLKD: this rank's rows.
        split: who computes which heads.
        rank_lens: rows of each Ulysses rank.
        ulysses: the Ulysses group.

    Returns:
        Queries (B, S, h, D), and keys and values (2, B, S, n, D), both contiguous.
    """
    batch, rows, _, dim = q_BLHD.shape
    widths = [_width(split, u) for u in range(ulysses.size)]
    send_sizes = [rows * batch * width * dim for width in widths]
    receive_sizes = [n * batch * widths[ulysses.rank] * dim for n in rank_lens]
    sent = q_BLHD.new_empty(sum(send_sizes))
    for u, block in enumerate(_blocks(sent, widths, rows, batch, dim)):
        queries, keys = split.q_ranges[u], split.kv_ranges[u]
        block[:, :, : len(queries)] = _rows_first(q_BLHD, queries)
        block[:, :, len(queries) : -len(keys)] = _rows_first(k_BLKD, keys)
        block[:, :, -len(keys) :] = _rows_first(v_BLKD, keys)
    received = sent.new_empty(sum(receive_sizes))
    ulysses.all_to_all(received, sent, receive_sizes, send_sizes)
    packed = received.view(sum(rank_lens), batch, widths[ulysses.rank], dim)
    heads = split.heads_per_rank
    q_BShD = rearrange(packed[:, :, :heads], "s b h d -> b s h d")
    kv = rearrange(packed[:, :, heads:], "s b (two n) d -> two b s n d", two=2)
    # Both are cut from one message; as results of an operator they must not share memory.
    dense = torch.contiguous_format
    return q_BShD.clone(memory_format=dense), kv.clone(memory_format=dense)


def scatter_seq_gather_heads_qkv(
    dq_BShD: torch.Tensor,
    dkv_2BSnD: torch.Tensor,
    split: HeadSplit,
    rank_lens: Sequence[int],
    ulysses: Communicator,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Undo `gather_seq_scatter_heads_qkv`; gradients of shared key/value heads are summed.

    Args:
        dq_BShD: this rank's heads, all rows.
        dkv_2BSnD: gradients of keys and of values.
        split, rank_lens, ulysses: as there.

    Returns:
        dq (B, L, H, D), dk and dv (B, L, K, D): all heads of this rank's rows.
    """
    batch, _, heads, dim = dq_BShD.shape
    rows = rank_lens[ulysses.rank]
    widths = [_width(split, u) for u in range(ulysses.size)]
    send_sizes = [n * batch * widths[ulysses.rank] * dim for n in rank_lens]
    receive_sizes = [rows * batch * width * dim for width in widths]
    packed = dq_BShD.new_empty((sum(rank_lens), batch, widths[ulysses.rank], dim))
    packed[:, :, :heads] = dq_BShD.transpose(0, 1)
    packed[:, :, heads:] = rearrange(dkv_2BSnD, "two b s n d -> s b (two n) d")
    received = packed.new_empty(sum(receive_sizes))
    ulysses.all_to_all(received, packed.view(-1), receive_sizes, send_sizes)

    dq = packed.new_empty((batch, rows, split.heads, dim))
    shared = sum(map(len, split.kv_ranges)) > split.kv_heads
    dtype = accumulator_dtype(packed.dtype) if shared else packed.dtype
    dk = packed.new_zeros((batch, rows, split.kv_heads, dim), dtype=dtype)
    dv = torch.zeros_like(dk)
    for u, block in enumerate(_blocks(received, widths, rows, batch, dim)):
        queries, keys = split.q_ranges[u], split.kv_ranges[u]
        dq[:, :, queries.start : queries.stop] = block[:, :, : len(queries)].transpose(0, 1)
        dk[:, :, keys.start : keys.stop] += block[:, :, len(queries) : -len(keys)].transpose(0, 1)
        dv[:, :, keys.start : keys.stop] += block[:, :, -len(keys) :].transpose(0, 1)
    return dq, dk.to(packed.dtype), dv.to(packed.dtype)


def scatter_seq_gather_heads(
    x_BShD: torch.Tensor, rank_lens: Sequence[int], ulysses: Communicator
) -> torch.Tensor:
    """This rank's heads of all rows (B, S, h, D) → all heads of this rank's rows (B, L, H, D)."""
    batch, _, heads, dim = x_BShD.shape
    rows = rank_lens[ulysses.rank]
    row_size = batch * heads * dim
    sent = rearrange(x_BShD, "b s h d -> s b h d").contiguous()
    received = sent.new_empty((ulysses.size, rows, batch, heads, dim))
    ulysses.all_to_all(
        received.view(-1),
        sent.view(-1),
        [rows * row_size] * ulysses.size,
        [n * row_size for n in rank_lens],
    )
    return rearrange(received, "u l b h d -> b l (u h) d").contiguous()


def gather_seq_scatter_heads(
    x_BLHD: torch.Tensor, rank_lens: Sequence[int], ulysses: Communicator
) -> torch.Tensor:
    """All heads of this rank's rows (B, L, H, D) → this rank's heads of all rows (B, S, h, D)."""
    batch, rows, heads, dim = x_BLHD.shape
    row_size = batch * (heads // ulysses.size) * dim
    sent = rearrange(x_BLHD, "b l (u h) d -> u l b h d", u=ulysses.size).contiguous()
    received = sent.new_empty((sum(rank_lens), batch, heads // ulysses.size, dim))
    ulysses.all_to_all(
        received.view(-1),
        sent.view(-1),
        [n * row_size for n in rank_lens],
        [rows * row_size] * ulysses.size,
    )
    return rearrange(received, "s b h d -> b s h d").contiguous()


def _width(split: HeadSplit, ulysses_rank: int) -> int:
    """Heads that one rank receives for each row: its queries', keys' and values'."""
    return len(split.q_ranges[ulysses_rank]) + 2 * len(split.kv_ranges[ulysses_rank])


def _blocks(
    flat: torch.Tensor, widths: Sequence[int], rows: int, batch: int, dim: int
) -> Iterator[torch.Tensor]:
    """The part of each Ulysses rank in a flat buffer, as (rows, batch, heads, dim)."""
    pieces = flat.split([rows * batch * width * dim for width in widths])
    for piece, width in zip(pieces, widths, strict=True):
        yield piece.view(rows, batch, width, dim)


def _rows_first(x_BLHD: torch.Tensor, heads: range) -> torch.Tensor:
    return x_BLHD[:, :, heads.start : heads.stop].transpose(0, 1)
