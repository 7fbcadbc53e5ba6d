"""The two Ulysses transposes: sequence shards to head shards and back, one All-to-All each.

One worked case, B = 1, H = 8 query heads, K = 2 key/value heads, U = 4, ring position of S = 16
tokens (DeepSpeed Ulysses, arXiv 2309.14509, section 3):

                     before: sequence shard     after: head shard
    q                (1, 4, 8, D)               (1, 16, 2, D)
    k, v             (1, 4, 2, D) each          (1, 16, 1, D) each: ranks 0, 1 hold head 0

q, k and v travel packed in one message, one part after the other. Neither rows nor heads need to
divide: every part has its own size.

Shapes: B batch, S rows of the ring position, L rows of this rank, H/K query/key-value heads of
all ranks, h/n those of this rank, D and Dv head dims of keys and values.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

import torch

from hybridcp.attention.heads import HeadSplit
from hybridcp.attention.kv_block import KVShape
from hybridcp.attention.online_softmax import accumulator_dtype
from hybridcp.communicator import Communicator

Shape = tuple[int, int, int, int]


def gather_seq_scatter_heads_qkv(
    q_BLHD: torch.Tensor,
    k_BLKD: torch.Tensor,
    v_BLKE: torch.Tensor,
    split: HeadSplit,
    rank_lens: Sequence[int],
    ulysses: Communicator,
) -> tuple[torch.Tensor, torch.Tensor]:
    """All heads of this rank's rows → this rank's heads of all rows.

    Args:
        q_BLHD, k_BLKD, v_BLKE: this rank's rows.
        split: who computes which heads.
        rank_lens: rows of each Ulysses rank.
        ulysses: the Ulysses group.

    Returns:
        Queries (B, S, h, D) and the flat block (`kv_block`) of keys and values.
    """
    batch, rows, _, dim = q_BLHD.shape
    value_dim = v_BLKE.size(3)
    me = ulysses.rank
    sent, sizes = _buffer(
        [_qkv_shapes(split, u, batch, rows, dim, value_dim) for u in range(ulysses.size)], q_BLHD
    )
    for u, parts in enumerate(_parts(sent, sizes)):
        queries, keys = split.q_ranges[u], split.kv_ranges[u]
        for part, whole, heads in zip(
            parts, (q_BLHD, k_BLKD, v_BLKE), (queries, keys, keys), strict=True
        ):
            part.copy_(whole[:, :, heads.start : heads.stop])

    received, receive_sizes = _buffer(
        [_qkv_shapes(split, me, batch, n, dim, value_dim) for n in rank_lens], q_BLHD
    )
    _all_to_all(ulysses, received, receive_sizes, sent, sizes)
    total = sum(rank_lens)
    q_heads = q_BLHD.new_empty((batch, total, len(split.q_ranges[me]), dim))
    shape = KVShape(batch, len(split.kv_ranges[me]), dim, value_dim)
    block = shape.empty(total, q_BLHD)
    gathered = (q_heads, *shape.views(block))
    for rows_of_u, parts in zip(_slices(rank_lens), _parts(received, receive_sizes), strict=True):
        for whole, part in zip(gathered, parts, strict=True):
            whole[:, rows_of_u] = part
    return q_heads, block


def scatter_seq_gather_heads_qkv(
    dq_BShD: torch.Tensor,
    dblock: torch.Tensor,
    split: HeadSplit,
    value_dim: int,
    rank_lens: Sequence[int],
    ulysses: Communicator,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Undo `gather_seq_scatter_heads_qkv`; gradients of shared key/value heads are summed.

    Args:
        dq_BShD: this rank's heads, all rows.
        dblock: flat gradient of keys and values.
        split, rank_lens, ulysses: as there.
        value_dim: Dv.

    Returns:
        dq (B, L, H, D), dk (B, L, K, D) and dv (B, L, K, Dv): all heads of this rank's rows.
    """
    batch, _, _, dim = dq_BShD.shape
    me = ulysses.rank
    rows = rank_lens[me]
    shape = KVShape(batch, len(split.kv_ranges[me]), dim, value_dim)
    gradients = (dq_BShD, *shape.views(dblock))
    sent, sizes = _buffer(
        [_qkv_shapes(split, me, batch, n, dim, value_dim) for n in rank_lens], dq_BShD
    )
    for rows_of_u, parts in zip(_slices(rank_lens), _parts(sent, sizes), strict=True):
        for whole, part in zip(gradients, parts, strict=True):
            part.copy_(whole[:, rows_of_u])

    received, receive_sizes = _buffer(
        [_qkv_shapes(split, u, batch, rows, dim, value_dim) for u in range(ulysses.size)], dq_BShD
    )
    _all_to_all(ulysses, received, receive_sizes, sent, sizes)
    dtype = dq_BShD.dtype
    shared = sum(map(len, split.kv_ranges)) > split.kv_heads
    sum_dtype = accumulator_dtype(dtype) if shared else dtype
    dq = dq_BShD.new_empty((batch, rows, split.heads, dim))
    dk = dq.new_zeros((batch, rows, split.kv_heads, dim), dtype=sum_dtype)
    dv = dq.new_zeros((batch, rows, split.kv_heads, value_dim), dtype=sum_dtype)
    for u, (of_q, of_k, of_v) in enumerate(_parts(received, receive_sizes)):
        queries, keys = split.q_ranges[u], split.kv_ranges[u]
        dq[:, :, queries.start : queries.stop] = of_q
        dk[:, :, keys.start : keys.stop] += of_k
        dv[:, :, keys.start : keys.stop] += of_v
    return dq, dk.to(dtype), dv.to(dtype)


def scatter_seq_gather_heads(
    x_BShD: torch.Tensor, split: HeadSplit, rank_lens: Sequence[int], ulysses: Communicator
) -> torch.Tensor:
    """This rank's heads of all rows (B, S, h, D) → all heads of this rank's rows (B, L, H, D)."""
    batch, _, heads, dim = x_BShD.shape
    rows = rank_lens[ulysses.rank]
    sent, sizes = _buffer([[(batch, n, heads, dim)] for n in rank_lens], x_BShD)
    for rows_of_u, (part,) in zip(_slices(rank_lens), _parts(sent, sizes), strict=True):
        part.copy_(x_BShD[:, rows_of_u])
    received, receive_sizes = _buffer(
        [[(batch, rows, len(queries), dim)] for queries in split.q_ranges], x_BShD
    )
    _all_to_all(ulysses, received, receive_sizes, sent, sizes)
    return torch.cat([part for (part,) in _parts(received, receive_sizes)], dim=2)


def gather_seq_scatter_heads(
    x_BLHD: torch.Tensor, split: HeadSplit, rank_lens: Sequence[int], ulysses: Communicator
) -> torch.Tensor:
    """All heads of this rank's rows (B, L, H, D) → this rank's heads of all rows (B, S, h, D)."""
    batch, rows, _, dim = x_BLHD.shape
    heads = len(split.q_ranges[ulysses.rank])
    sent, sizes = _buffer(
        [[(batch, rows, len(queries), dim)] for queries in split.q_ranges], x_BLHD
    )
    for queries, (part,) in zip(split.q_ranges, _parts(sent, sizes), strict=True):
        part.copy_(x_BLHD[:, :, queries.start : queries.stop])
    received, receive_sizes = _buffer([[(batch, n, heads, dim)] for n in rank_lens], x_BLHD)
    _all_to_all(ulysses, received, receive_sizes, sent, sizes)
    return torch.cat([part for (part,) in _parts(received, receive_sizes)], dim=1)


def _qkv_shapes(
    split: HeadSplit, ulysses_rank: int, batch: int, rows: int, dim: int, value_dim: int
) -> list[Shape]:
    """Shapes of the q, k and v parts that one rank's heads need of some rows."""
    heads, kv_heads = len(split.q_ranges[ulysses_rank]), len(split.kv_ranges[ulysses_rank])
    return [
        (batch, rows, heads, dim),
        (batch, rows, kv_heads, dim),
        (batch, rows, kv_heads, value_dim),
    ]


def _buffer(
    shapes: list[list[Shape]], like: torch.Tensor
) -> tuple[torch.Tensor, list[list[Shape]]]:
    """A flat tensor with room for the parts of every Ulysses rank, and their shapes."""
    elements = sum(torch.Size(shape).numel() for of_rank in shapes for shape in of_rank)
    return like.new_empty(elements), shapes


def _parts(flat: torch.Tensor, shapes: list[list[Shape]]) -> Iterator[list[torch.Tensor]]:
    """For each Ulysses rank its parts, as views of the flat tensor."""
    start = 0
    for of_rank in shapes:
        parts = []
        for shape in of_rank:
            stop = start + torch.Size(shape).numel()
            parts.append(flat[start:stop].view(shape))
            start = stop
        yield parts


def _all_to_all(
    ulysses: Communicator,
    received: torch.Tensor,
    receive_shapes: list[list[Shape]],
    sent: torch.Tensor,
    send_shapes: list[list[Shape]],
) -> None:
    receive_sizes, send_sizes = (
        [sum(torch.Size(shape).numel() for shape in of_rank) for of_rank in shapes]
        for shapes in (receive_shapes, send_shapes)
    )
    ulysses.all_to_all(received, sent, receive_sizes, send_sizes)


def _slices(rank_lens: Sequence[int]) -> Iterator[slice]:
    """Rows of each Ulysses rank within the ring position."""
    return (slice(a, b) for a, b in pairwise([0, *accumulate(rank_lens)]))
