"""A layout as text: rank grid, token map, work of each ring position. At most 100 columns."""

from collections.abc import Sequence

from hybridcp.layout import Layout
from hybridcp.planner.units import count_of
from hybridcp.planner.work import ring_work
from hybridcp.schedule import Schedule
from hybridcp.sharding import Sharding, TokenRange

WIDTH = 100
ENDS = 4
"""Lines shown of each end of a long list."""


def rank_grid(layout: Layout, ranks_per_node: int) -> str:
    """One row a node, one cell a rank, as `rank:ring_rank.ulysses_rank`."""
    total = layout.cp_degree
    starts = range(0, total, ranks_per_node)
    width = max(len(_cell(layout, rank)) for rank in (0, total // 2, total - 1))
    label = len(str(len(starts) - 1))
    room = max(3, (WIDTH - len("node   ") - label) // (width + 2))
    rows = []
    for node, start in enumerate(starts):
        ranks = range(start, min(start + ranks_per_node, total))
        if len(ranks) > room:
            cells = [_cell(layout, rank) for rank in ranks[: room - 2]]
            cells += ["…", _cell(layout, ranks[-1])]
        else:
            cells = [_cell(layout, rank) for rank in ranks]
        row = "  ".join(cell.ljust(width) for cell in cells)
        rows.append(f"node {node:{label}}  {row}".rstrip())
    return "\n".join(
        [
            f"ulysses {layout.ulysses_degree} x ring {layout.ring_degree}, {layout.order}; "
            "each rank is rank:ring_rank.ulysses_rank",
            *_ends(rows, "node"),
        ]
    )


def token_map(layout: Layout, sharding: Sharding) -> str:
    """The global token ranges of each rank."""
    label = len(str(layout.cp_degree - 1))
    rows = []
    for rank in range(layout.cp_degree):
        if ENDS <= rank < layout.cp_degree - ENDS - 1 and layout.cp_degree > 2 * ENDS + 1:
            rows.append("")
            continue
        ring_rank, ulysses_rank = layout.coordinates(rank)
        ranges = _ranges_text(sharding.rank_ranges(ring_rank, ulysses_rank))
        size = sharding.rank_lens(ring_rank)[ulysses_rank]
        rows.append(f"rank {rank:{label}} holds {ranges}: {count_of(size, 'token')}")
    return "\n".join([f"{sharding.seq_len} tokens, {layout.sharding}", *_ends(rows, "rank")])


def work_map(schedule: Schedule) -> str:
    """(query, key) pairs of each ring position relative to the mean, with a bar."""
    work = ring_work(schedule)
    pairs = [sum(band.pairs for band in bands) for bands in work.kinds]
    allowed = schedule.mask.pairs(schedule.sharding.seq_len, schedule.sharding.seq_len)
    mean = allowed / schedule.ring_degree
    label = len(str(schedule.ring_degree - 1))
    rows = []
    for ring_rank, kinds in work.positions.items():
        share = sum(pairs[kind] for kind in kinds) / mean if mean else 1.0
        bar = "#" * min(round(20 * share), 60)
        rows.append(f"ring {ring_rank:{label}}  {share:5.2f}  {bar}".rstrip())
    return "\n".join([f"work relative to the mean, mask {schedule.mask}", *_ends(rows, "line")])


def _cell(layout: Layout, rank: int) -> str:
    ring_rank, ulysses_rank = layout.coordinates(rank)
    return f"{rank}:{ring_rank}.{ulysses_rank}"


def _ranges_text(ranges: Sequence[TokenRange]) -> str:
    shown = [f"[{start}, {stop})" for start, stop in ranges[:2]]
    if len(ranges) > 2:
        shown.append(f"… {count_of(len(ranges) - 2, 'more range')}")
    return " + ".join(shown) or "nothing"


def _ends(lines: list[str], what: str) -> list[str]:
    """The first and last few lines, and how many are left out between."""
    hidden = len(lines) - 2 * ENDS
    if hidden <= 1:
        return lines
    return [*lines[:ENDS], f"… {count_of(hidden, f'more {what}')}", *lines[-ENDS:]]
