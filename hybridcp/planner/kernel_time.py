"""Time of the attention kernels and of the merges between them: one formula a function."""

from hybridcp.masks import Band
from hybridcp.planner.cluster import AttentionEfficiency, Gpu
from hybridcp.planner.problem import ACCUMULATOR_BYTES, Problem

BACKWARD_FLOPS = 2.5
"""FLOPs of the backward ÷ forward: five matrix products instead of two (FlashAttention-2,
arXiv 2307.08691, section 4.1)."""


def forward_flops(pairs: int, heads: int, head_dim: int, batch: int) -> int:
    """FLOPs of q · kᵀ and p · v: two products of 2 · D FLOPs for each pair and head."""
    return 4 * pairs * head_dim * heads * batch


def padded_efficiency(gpu: Gpu, head_dim: int) -> AttentionEfficiency:
    """The kernel that serves a head dim: the smallest listed that holds it, or the largest."""
    rows = sorted(gpu.attention, key=lambda row: row.head_dim)
    return next((row for row in rows if row.head_dim >= head_dim), rows[-1])


def saturation(inner_rows: float, half_rows: float) -> float:
    """Share of its best speed that a kernel reaches with inner loops of so many rows.

    The forward kernel loads a tile of queries, walks its keys, and stores; the backward loads a
    tile of keys and walks its queries (FlashAttention-2, arXiv 2307.08691, algorithms 1 and 2).
    Loading and storing cost as much as `half_rows` rows: rows / (rows + half_rows). With the mean
    number of rows one curve fits published causal and full-attention speeds of FlashAttention-2
    and -3 to about 5 % (root mean square).
    """
    return inner_rows / (inner_rows + half_rows)


def occupancy(bands: tuple[Band, ...], heads: int, batch: int, gpu: Gpu) -> float:
    """Share of the multiprocessors that have a tile of query rows, at most 1."""
    tiles = sum(-(-band.q_len // gpu.q_tile_rows) for band in bands) * heads * batch
    return min(1.0, tiles / gpu.multiprocessors)


def kernel_calls(bands: tuple[Band, ...]) -> int:
    """Kernel calls of one step: bands that share a window are one varlen call."""
    return len({band.flash_window for band in bands})


def kernel_seconds(
    bands: tuple[Band, ...], problem: Problem, query_heads: int, *, backward: bool
) -> float:
    """Time to compute the bands of one step on one rank.

    Launches, plus FLOPs ÷ (peak · efficiency · occupancy), where head dims are padded to the
    kernel's. Efficiency differs by band, because inner loops are longer or shorter.
    """
    gpu = problem.cluster.gpu
    row = padded_efficiency(gpu, problem.head_dim)
    best, half_rows = (
        (row.backward_max, row.backward_half_queries)
        if backward
        else (row.forward_max, row.forward_half_keys)
    )
    seconds = kernel_calls(bands) * gpu.kernel_launch_us * 1e-6
    if not bands:
        return seconds
    speed = gpu.peak_tflops[problem.dtype] * 1e12 * best
    speed *= occupancy(bands, query_heads, problem.batch, gpu)
    head_dim = max(problem.head_dim, row.head_dim)
    for band in bands:
        pairs = band.pairs
        flops = float(forward_flops(pairs, query_heads, head_dim, problem.batch))
        if backward:
            flops *= BACKWARD_FLOPS
        inner_rows = pairs / (band.k_len if backward else band.q_len)
        seconds += flops / (speed * saturation(inner_rows, half_rows))
    return seconds


def merge_seconds(bands: tuple[Band, ...], problem: Problem, query_heads: int) -> float:
    """Forward: online-softmax merge of one step's partial output into the float32 accumulator.

    Memory traffic: each element of the partial output is read, of the accumulator read and
    written.
    """
    elements = sum(band.q_len for band in bands) * query_heads * problem.head_dim * problem.batch
    moved = elements * (problem.item_bytes + 2 * ACCUMULATOR_BYTES)
    return moved / (problem.cluster.gpu.memory_bandwidth_gb_per_s * 1e9)


def accumulate_seconds(
    bands: tuple[Band, ...],
    problem: Problem,
    query_heads: int,
    key_heads: int,
    arriving_rows: int,
) -> float:
    """Backward: partial dq, dk, dv of one step added into float32, and the arriving dk, dv added.

    Memory traffic: partials are read, accumulators read and written; of the arriving gradient
    (`arriving_rows` tokens, 0 if none) each element is read, and its sum read and written.
    """
    query_rows = sum(band.q_len for band in bands)
    key_rows = sum(band.k_len for band in bands)
    added = query_rows * query_heads + 2 * key_rows * key_heads
    moved = added * (problem.item_bytes + 2 * ACCUMULATOR_BYTES)
    moved += 2 * arriving_rows * key_heads * 3 * ACCUMULATOR_BYTES
    moved *= problem.head_dim * problem.batch
    return moved / (problem.cluster.gpu.memory_bandwidth_gb_per_s * 1e9)
