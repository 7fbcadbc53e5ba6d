"""Proof that messages meet, blocks are where steps say they are, and gradients come home.

Works on the steps of all ring positions at once: `steps[ring_rank][t]`.
"""

from collections.abc import Sequence

from hybridcp.errors import ScheduleError
from hybridcp.schedule import Rows, Schedule, Step, Transfer

Steps = Sequence[tuple[Step, ...]]
Block = tuple[int, Rows]


def check_transfers(schedule: Schedule, forward: Steps, backward: Steps) -> None:
    """Follow every message of both passes.

    Raises:
        ScheduleError: the first step where something is missing, lost or elsewhere.
    """
    whole = [schedule.whole_block(r) for r in range(schedule.ring_degree)]
    for name, steps in (("forward", forward), ("backward", backward)):
        _check_steps(name, steps)
        _check_pairing(name, steps)
    own: list[Block] = list(enumerate(whole))
    last = _follow_blocks("forward", forward, own, own, schedule)
    # What arrived last is kept for the backward.
    _follow_blocks("backward", backward, last, own, schedule)
    if schedule.exchange == "ring":
        _follow_ring_gradients(backward)
    else:
        _check_direct_gradients(backward)


def _check_steps(name: str, steps: Steps) -> None:
    degree = len(steps)
    for r, of_rank in enumerate(steps):
        if len(of_rank) != degree:
            raise ScheduleError(
                f"{name}, ring position {r}: {len(of_rank)} steps in a ring of {degree}"
            )
        owners = sorted(step.kv_owner for step in of_rank)
        if owners != list(range(degree)):
            raise ScheduleError(f"{name}, ring position {r}: visits the blocks {owners}")
        if of_rank[-1].send is not None or of_rank[-1].receive is not None:
            raise ScheduleError(
                f"{name}, ring position {r}: the last step moves a block that no step is left to "
                "use"
            )


def _check_pairing(name: str, steps: Steps) -> None:
    """Each send meets a receive of the same rows at the same step, and the reverse."""
    for r, of_rank in enumerate(steps):
        for t, step in enumerate(of_rank):
            here = f"{name} step {t}, ring position {r}"
            for what, sent, received in (
                ("block", step.send, step.receive),
                ("gradient", step.send_gradient, step.receive_gradient),
            ):
                for transfer in (sent, received):
                    if transfer and (transfer.peer == r or not 0 <= transfer.peer < len(steps)):
                        raise ScheduleError(
                            f"{here}: {transfer.peer} is no other position of the ring"
                        )
                if sent and _incoming(steps[sent.peer][t], what) != Transfer(r, sent.rows):
                    raise ScheduleError(
                        f"{here}: sends a {what} to {sent.peer}, which does not receive it"
                    )
                if received and _outgoing(steps[received.peer][t], what) != Transfer(
                    r, received.rows
                ):
                    raise ScheduleError(
                        f"{here}: waits for a {what} of {received.peer}, which does not send it"
                    )


def _follow_blocks(
    name: str,
    steps: Steps,
    first: Sequence[Block],
    own: Sequence[Block],
    schedule: Schedule,
) -> list[Block]:
    """Each step computes on its own block or on what has just arrived; what arrived last."""
    degree = len(steps)
    present = list(first)
    arrived_last = list(own)
    for t in range(degree):
        for r in range(degree):
            step = steps[r][t]
            if step.bands and (step.kv_owner, step.kv_rows) not in (present[r], own[r]):
                raise ScheduleError(
                    f"{name} step {t}, ring position {r}: computes the block of {step.kv_owner}, "
                    f"but holds that of {present[r][0]}"
                )
        arriving = list(own)
        for r in range(degree):
            received = steps[r][t].receive
            if received is not None:
                sender = present[received.peer]
                owner = received.peer if schedule.exchange == "direct" else sender[0]
                if schedule.exchange == "ring" and sender[1] != received.rows:
                    raise ScheduleError(
                        f"{name} step {t}, ring position {received.peer}: passes on rows that it "
                        "does not hold"
                    )
                arriving[r] = (owner, received.rows)
                if t == degree - 2:
                    arrived_last[r] = arriving[r]
        present = arriving
    return arrived_last


def _follow_ring_gradients(backward: Steps) -> None:
    """The gradient of each block goes from position to position, and to its owner last."""
    degree = len(backward)
    for r, of_rank in enumerate(backward):
        if of_rank[-1].kv_owner != r:
            raise ScheduleError(f"backward, ring position {r}: its own block is not the last")
        for t, step in enumerate(of_rank[:-1]):
            here = f"backward step {t}, ring position {r}"
            sent = step.send_gradient
            if (sent.rows if sent else ()) != step.kv_rows:
                raise ScheduleError(f"{here}: does not send on the gradient of its block")
            if sent and backward[sent.peer][t + 1].kv_owner != step.kv_owner:
                raise ScheduleError(
                    f"{here}: the gradient of the block of {step.kv_owner} reaches "
                    f"{sent.peer} beside another block"
                )
    if any(of_rank[-1].send_gradient for of_rank in backward) and degree:
        raise ScheduleError("backward: the last step sends a gradient that nobody adds")


def _check_direct_gradients(backward: Steps) -> None:
    """The gradient of each block goes straight to its owner."""
    for r, of_rank in enumerate(backward):
        for t, step in enumerate(of_rank):
            home = step.kv_owner == r
            expected = None if home or not step.kv_rows else Transfer(step.kv_owner, step.kv_rows)
            if step.send_gradient != expected:
                raise ScheduleError(
                    f"backward step {t}, ring position {r}: does not send the gradient of its "
                    f"block to {step.kv_owner}"
                )


def _incoming(step: Step, what: str) -> Transfer | None:
    return step.receive if what == "block" else step.receive_gradient


def _outgoing(step: Step, what: str) -> Transfer | None:
    return step.send if what == "block" else step.send_gradient
