"""Proof, without running anything, that a layout computes a mask exactly.

`check` walks the schedule of every ring position and shows that each allowed (query, key) pair
is computed exactly once in each pass, that each send has its receive, that each block is where a
step says it is, and that each gradient reaches its owner. It recomputes nothing the way the
schedule did: local bands are mapped back to global positions and counted against the mask.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from hybridcp.errors import ScheduleError
from hybridcp.masks import Band, first_overlap
from hybridcp.schedule import Schedule
from hybridcp.sharding import TokenRange
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
    with _without_garbage_collection():
        return _check(schedule)


def _check(schedule: Schedule) -> CheckReport:
    positions = range(schedule.ring_degree)
    forward = [schedule.forward_steps(r) for r in positions]
    backward = [schedule.backward_steps(r) for r in positions]
    check_transfers(schedule, forward, backward)
    for r in positions:
        if _work_by_owner(forward[r]) != _work_by_owner(backward[r]):
            raise ScheduleError(f"ring position {r}: forward and backward compute different bands")

    work = [
        _checked_pairs(
            schedule, list(schedule.sharding.local_rows(r)), f"ring position {r}", forward[r]
        )
        for r in positions
    ]
    allowed = schedule.mask.pairs(schedule.sharding.seq_len, schedule.kv_sharding.seq_len)
    if sum(work) != allowed:
        raise ScheduleError(f"{sum(work)} pairs are computed, but the mask allows {allowed}")
    return CheckReport(
        pairs=allowed,
        bands=sum(len(step.bands) for steps in forward for step in steps),
        hops=sum(len(step.sends) for steps in forward for step in steps),
        busiest_share=max(work) * len(work) / allowed if allowed else 1.0,
    )


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Steps are millions of small tuples without cycles; the collector would walk them for long."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _checked_pairs(
    schedule: Schedule, queries: list[tuple[TokenRange, int]], here: str, steps: tuple[Step, ...]
) -> int:
    """Pairs of a position's steps, after showing that bands are disjoint and inside the mask."""
    total = 0
    for step in steps:
        overlap = first_overlap(sorted(step.bands)) if len(step.bands) > 1 else None
        if overlap is not None:
            raise ScheduleError(
                f"{_of(here, step)}: {overlap[0]} and {overlap[1]} compute a pair twice"
            )
        keys = _present_keys(schedule, step) if step.bands else []
        for band in step.bands:
            covered = 0
            for piece in _global_pieces(band, queries, keys):
                covered += piece.pairs
                if not _is_inside(schedule.mask_bands_at(piece.q0, piece.q1), piece):
                    raise ScheduleError(
                        f"{_of(here, step)}: {piece} leaves the mask {schedule.mask}"
                    )
            if covered != band.pairs:
                raise ScheduleError(f"{_of(here, step)}: {band} reaches rows that are not present")
            total += covered
    return total


def _of(here: str, step: Step) -> str:
    return f"{here}, {'gathered blocks' if step.kv_owner is None else f'block of {step.kv_owner}'}"


def _is_inside(allowed: list[Band], piece: Band) -> bool:
    """Whether disjoint bands have all pairs of a trimmed band."""
    if any(band.holds(piece) for band in allowed):
        return True
    common = (piece.intersect(band) for band in allowed)
    return sum(band.pairs for band in common if band is not None) == piece.pairs


def _global_pieces(
    band: Band, queries: list[tuple[TokenRange, int]], keys: list[tuple[TokenRange, int]]
) -> Iterator[Band]:
    """The band of a step in global positions, cut where neighbouring rows are not neighbours.

    Args:
        band: in local rows.
        queries: global ranges of the position, each with its first local row.
        keys: global ranges that are present, each with its first row in the block.
    """
    for (q_start, q_stop), q_row in queries:
        q_end = q_row + q_stop - q_start
        if q_row >= band.q1 or q_end <= band.q0:
            continue
        for (k_start, k_stop), k_row in keys:
            k_end = k_row + k_stop - k_start
            if k_row < band.k1 and k_end > band.k0:
                piece = band.intersect(Band(q_row, q_end, k_row, k_end))
                if piece is not None:
                    yield piece.shifted(q_start - q_row, k_start - k_row)


def _present_keys(schedule: Schedule, step: Step) -> list[tuple[TokenRange, int]]:
    """Global positions of the present keys, each run with its first row in the present block."""
    if step.kv_owner is None:
        return [(TokenRange(0, schedule.kv_sharding.seq_len), 0)]
    found = []
    offset = 0
    for rows in step.kv_rows:
        for piece, row in schedule.kv_sharding.local_rows(step.kv_owner):
            first, last = max(rows.start, row), min(rows.stop, row + piece.size)
            if first < last:
                keys = TokenRange(piece.start + first - row, piece.start + last - row)
                found.append((keys, offset + first - rows.start))
        offset += rows.size
    return found


def _work_by_owner(
    steps: tuple[Step, ...],
) -> dict[int | None, tuple[Rows, tuple[Band, ...]]]:
    return {step.kv_owner: (step.kv_rows, step.bands) for step in steps}
