"""Proof, without running anything, that a layout computes a mask exactly.

`check` walks the schedule of every ring position and shows that each allowed (query, key) pair
is computed exactly once in each pass, that each send has its receive, that each block is where a
step says it is, and that each gradient reaches its owner. It recomputes nothing the way the
schedule did: local bands are mapped back to global positions and counted against the mask.
"""

from dataclasses import dataclass

from hybridcp.errors import ScheduleError
from hybridcp.masks import Band, first_overlap
from hybridcp.schedule import Schedule
from hybridcp.steps import Rows, Step
from hybridcp.transfer_proof import check_transfers


@dataclass(frozen=True, slots=True)
class CheckReport:
    """What was proved.

    Attributes:
        pairs: allowed (query, key) pairs, each computed exactly once in each pass.
        bands: kernel regions over all ring positions and steps of one pass.
        hops: messages with keys and values in the forward pass, each met by its receive; an
            all-gather is none of them.
        busiest_share: pairs of the busiest ring position ÷ mean.
    """

    pairs: int
    bands: int
    hops: int
    busiest_share: float


def check(schedule: Schedule) -> CheckReport:
    """Prove a schedule, forward and backward.

    Raises:
        ScheduleError: the first ring position and step where the proof fails, and why.
    """
    positions = range(schedule.ring_degree)
    forward = [schedule.forward_steps(r) for r in positions]
    backward = [schedule.backward_steps(r) for r in positions]
    check_transfers(schedule, forward, backward)
    for r in positions:
        if _work_by_owner(forward[r]) != _work_by_owner(backward[r]):
            raise ScheduleError(f"ring position {r}: forward and backward compute different bands")

    work = [sum(_checked_pairs(schedule, r, step) for step in forward[r]) for r in positions]
    allowed = schedule.mask.pairs(schedule.sharding.seq_len, schedule.kv_sharding.seq_len)
    if sum(work) != allowed:
        raise ScheduleError(f"{sum(work)} pairs are computed, but the mask allows {allowed}")
    return CheckReport(
        pairs=allowed,
        bands=sum(len(step.bands) for steps in forward for step in steps),
        hops=sum(len(step.sends) for steps in forward for step in steps),
        busiest_share=max(work) * len(work) / allowed if allowed else 1.0,
    )


def _checked_pairs(schedule: Schedule, ring_rank: int, step: Step) -> int:
    """Pairs of one step, after showing that its bands are disjoint and inside the mask."""
    of_owner = "gathered blocks" if step.kv_owner is None else f"block of {step.kv_owner}"
    here = f"ring position {ring_rank}, {of_owner}"
    overlap = first_overlap(sorted(step.bands))
    if overlap is not None:
        raise ScheduleError(f"{here}: {overlap[0]} and {overlap[1]} compute a pair twice")
    total = 0
    for band in step.bands:
        covered = 0
        for piece in _global_pieces(schedule, band, ring_rank, step):
            covered += piece.pairs
            inside = sum(
                common.pairs
                for allowed in schedule.mask_bands_at(piece.q0, piece.q1)
                if (common := piece.intersect(allowed)) is not None
            )
            if inside != piece.pairs:
                raise ScheduleError(f"{here}: {piece} leaves the mask {schedule.mask}")
        if covered != band.pairs:
            raise ScheduleError(f"{here}: {band} reaches rows that are not present")
        total += covered
    return total


def _global_pieces(schedule: Schedule, band: Band, ring_rank: int, step: Step) -> list[Band]:
    """The band of a step in global positions, cut where neighbouring rows are not neighbours."""
    pieces = []
    for queries, q_row in schedule.sharding.local_rows(ring_rank):
        for keys, k_row in _present_keys(schedule, step):
            local = Band(q_row, q_row + queries.size, k_row, k_row + len(keys))
            piece = band.intersect(local)
            if piece is not None:
                pieces.append(piece.shifted(queries.start - q_row, keys.start - k_row))
    return pieces


def _present_keys(schedule: Schedule, step: Step) -> list[tuple[range, int]]:
    """Global positions of the present keys, each run with its first row in the present block."""
    if step.kv_owner is None:
        return [(range(schedule.kv_sharding.seq_len), 0)]
    found = []
    offset = 0
    for rows in step.kv_rows:
        for piece, row in schedule.kv_sharding.local_rows(step.kv_owner):
            first, last = max(rows.start, row), min(rows.stop, row + piece.size)
            if first < last:
                keys = range(piece.start + first - row, piece.start + last - row)
                found.append((keys, offset + first - rows.start))
        offset += rows.size
    return found


def _work_by_owner(
    steps: tuple[Step, ...],
) -> dict[int | None, tuple[Rows, tuple[Band, ...]]]:
    return {step.kv_owner: (step.kv_rows, step.bands) for step in steps}
