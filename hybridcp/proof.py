"""Proof, without running anything, that a layout computes a mask exactly.

`check` walks the schedule of every ring position and shows that each allowed (query, key) pair
is computed exactly once, that each send has its receive, and that each block is where a step
says it is. It recomputes nothing the way the schedule did: local bands are mapped back to global
positions and counted against the mask.
"""

from collections.abc import Callable
from dataclasses import dataclass

from hybridcp.errors import ScheduleError
from hybridcp.masks import Band, first_overlap
from hybridcp.schedule import Schedule, Step
from hybridcp.sharding import Sharding


@dataclass(frozen=True, slots=True)
class CheckReport:
    """What was proved.

    Attributes:
        pairs: allowed (query, key) pairs, each computed exactly once in each pass.
        bands: kernel regions over all ring positions and steps of one pass.
        hops: sends of key/value blocks in the forward pass, each met by its receive.
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
    _check_transfers("forward", forward, first_owner=lambda r: r)
    last_block = [steps[-1].kv_owner for steps in forward]
    _check_transfers("backward", backward, first_owner=last_block.__getitem__)
    for r in positions:
        if _bands_by_owner(forward[r]) != _bands_by_owner(backward[r]):
            raise ScheduleError(f"ring position {r}: forward and backward compute different bands")

    sharding = schedule.sharding
    work = [sum(_checked_pairs(schedule, r, step) for step in forward[r]) for r in positions]
    allowed = schedule.mask.pairs(sharding.seq_len, sharding.seq_len)
    if sum(work) != allowed:
        raise ScheduleError(f"{sum(work)} pairs are computed, but the mask allows {allowed}")
    return CheckReport(
        pairs=allowed,
        bands=sum(len(step.bands) for steps in forward for step in steps),
        hops=sum(step.send_to is not None for steps in forward for step in steps),
        busiest_share=max(work) * len(work) / allowed if allowed else 1.0,
    )


def _check_transfers(
    name: str, steps: list[tuple[Step, ...]], first_owner: Callable[[int], int]
) -> None:
    """Follow each block: what a position holds is what its neighbour sent one step before."""
    degree = len(steps)
    for r in range(degree):
        if len(steps[r]) != degree:
            raise ScheduleError(
                f"{name}, ring position {r}: {len(steps[r])} steps in a ring of {degree}"
            )
    present = [first_owner(r) for r in range(degree)]
    for t in range(degree):
        for r in range(degree):
            step = steps[r][t]
            here = f"{name} step {t}, ring position {r}"
            for peer in (step.send_to, step.receive_from):
                if peer is not None and (peer == r or not 0 <= peer < degree):
                    raise ScheduleError(f"{here}: {peer} is no other position of the ring")
            if t == degree - 1 and (step.send_to is not None or step.receive_from is not None):
                raise ScheduleError(f"{here}: moves a block that no step is left to use")
            if step.kv_owner != present[r]:
                raise ScheduleError(
                    f"{here}: computes the block of {step.kv_owner}, but holds that of {present[r]}"
                )
            if step.send_to is not None and steps[step.send_to][t].receive_from != r:
                raise ScheduleError(f"{here}: sends to {step.send_to}, which does not receive it")
            source = step.receive_from
            if source is not None and steps[source][t].send_to != r:
                raise ScheduleError(f"{here}: waits for {source}, which does not send to it")
        arriving = list(present)
        for r in range(degree):
            source = steps[r][t].receive_from
            # A position that receives nothing falls back on its own block, which it never gives up.
            arriving[r] = r if source is None else present[source]
        present = arriving
    for r in range(degree):
        owners = sorted(step.kv_owner for step in steps[r])
        if owners != list(range(degree)):
            raise ScheduleError(f"{name}, ring position {r}: visits the blocks {owners}")


def _checked_pairs(schedule: Schedule, ring_rank: int, step: Step) -> int:
    """Pairs of one step, after showing that its bands are disjoint and inside the mask."""
    here = f"ring position {ring_rank}, block of {step.kv_owner}"
    overlap = first_overlap(sorted(step.bands))
    if overlap is not None:
        raise ScheduleError(f"{here}: {overlap[0]} and {overlap[1]} compute a pair twice")
    sharding = schedule.sharding
    total = 0
    for band in step.bands:
        covered = 0
        for piece in _global_pieces(sharding, band, ring_rank, step.kv_owner):
            covered += piece.pairs
            inside = sum(
                common.pairs
                for allowed in schedule.mask_bands_at(piece.q0, piece.q1)
                if (common := piece.intersect(allowed)) is not None
            )
            if inside != piece.pairs:
                raise ScheduleError(f"{here}: {piece} leaves the mask {schedule.mask}")
        if covered != band.pairs:
            raise ScheduleError(f"{here}: {band} reaches rows that the position does not hold")
        total += covered
    return total


def _global_pieces(sharding: Sharding, band: Band, q_owner: int, k_owner: int) -> list[Band]:
    pieces = []
    for queries, q_row in sharding.local_rows(q_owner):
        for keys, k_row in sharding.local_rows(k_owner):
            local = Band(q_row, q_row + queries.size, k_row, k_row + keys.size)
            piece = band.intersect(local)
            if piece is not None:
                pieces.append(piece.shifted(queries.start - q_row, keys.start - k_row))
    return pieces


def _bands_by_owner(steps: tuple[Step, ...]) -> dict[int, tuple[Band, ...]]:
    return {step.kv_owner: step.bands for step in steps}
