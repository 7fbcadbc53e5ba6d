"""Proof that messages meet, blocks are where steps say they are, and gradients come home.

Works on the steps of all ring positions at once, `steps[ring_rank][t]`, and follows what is in
them, whatever exchange made them.
"""

from collections.abc import Sequence

from hybridcp.errors import ScheduleError
from hybridcp.schedule import Schedule
from hybridcp.steps import Rows, Step, Transfer, size_of

Steps = Sequence[tuple[Step, ...]]
Block = tuple[int, Rows]
Transfers = Sequence[Sequence[tuple[Transfer, ...]]]
"""Messages of each step of each position."""


def check_transfers(schedule: Schedule, forward: Steps, backward: Steps) -> None:
    """Follow every message of both passes.

    Raises:
        ScheduleError: the first step where something is missing, lost or elsewhere.
    """
    if schedule.exchange == "allgather":
        _check_gathered(schedule, forward)
        _check_gathered(schedule, backward)
        return
    own: list[Block] = [(r, schedule.whole_block(r)) for r in range(schedule.ring_degree)]
    for name, steps in (("forward", forward), ("backward", backward)):
        _check_steps(name, steps)
        _check_pairing(name, steps)
    _follow_blocks("forward", forward, own, own)
    # What is present last is kept for the backward.
    last: list[Block] = [_present(of_rank[-1]) for of_rank in forward]
    _follow_blocks("backward", backward, own, last)
    _follow_gradients(backward)


def _check_gathered(schedule: Schedule, steps: Steps) -> None:
    for r, of_rank in enumerate(steps):
        if len(of_rank) != 1 or of_rank[0].kv_owner is not None:
            raise ScheduleError(f"ring position {r}: an all-gather is one step with every block")
        present = size_of(of_rank[0].kv_rows)
        if present != schedule.kv_sharding.seq_len:
            raise ScheduleError(f"ring position {r}: {present} gathered rows are not all")


def _check_steps(name: str, steps: Steps) -> None:
    degree = len(steps)
    for r, of_rank in enumerate(steps):
        if len(of_rank) != degree:
            raise ScheduleError(
                f"{name}, ring position {r}: {len(of_rank)} steps in a ring of {degree}"
            )
        owners = [step.kv_owner for step in of_rank]
        if set(owners) != set(range(degree)):
            raise ScheduleError(f"{name}, ring position {r}: visits the blocks {owners}")


def _check_pairing(name: str, steps: Steps) -> None:
    """Each send meets a receive of the same rows at the same step, and the reverse."""
    sends, receives = (
        [[s.sends for s in r] for r in steps],
        [[s.receives for s in r] for r in steps],
    )
    _check_met(f"{name}: a block", sends, receives)
    _check_met(f"{name}: a block", receives, sends)
    sends = [[s.gradient_sends for s in r] for r in steps]
    receives = [[s.gradient_receives for s in r] for r in steps]
    _check_met(f"{name}: a gradient", sends, receives)
    _check_met(f"{name}: a gradient", receives, sends)


def _check_met(what: str, transfers: Transfers, others: Transfers) -> None:
    """Each message of one side is exactly one of the other side's, at the same step."""
    degree = len(transfers)
    for r, of_rank in enumerate(transfers):
        for t, of_step in enumerate(of_rank):
            for transfer in of_step:
                peer, _, rows, due = transfer
                problem = None
                if peer == r or not 0 <= peer < degree:
                    problem = f"{peer} is no other position of the ring"
                elif not rows:
                    problem = "nothing is sent or received as a message"
                elif not t < due < degree:
                    problem = f"no step is left to use it, it is due at {due}"
                else:
                    met = [other for other in others[peer][t] if other.peer == r]
                    # One message at a time between two positions: their order is never in doubt.
                    if len(met) != 1 or met[0][1:] != transfer[1:]:
                        problem = (
                            f"{_shown(transfer)} to or from {peer}, which has "
                            f"{[_shown(other) for other in met]}"
                        )
                if problem:
                    raise ScheduleError(f"{what} at step {t}, ring position {r}: {problem}")


def _shown(transfer: Transfer) -> str:
    rows = [tuple(piece) for piece in transfer.rows]
    return f"rows {rows} of {transfer.owner} for step {transfer.due}"


def _present(step: Step) -> Block:
    assert step.kv_owner is not None
    return step.kv_owner, step.kv_rows


def _follow_blocks(name: str, steps: Steps, own: Sequence[Block], first: Sequence[Block]) -> None:
    """Each step computes on its own block, on what is due, or at the start on what was kept."""
    for r, of_rank in enumerate(steps):
        arrives: dict[int, list[Block]] = {0: [first[r]]}
        for t, step in enumerate(of_rank):
            due = arrives.pop(t, [])
            present = _present(step)
            is_own = present[0] == r
            problem = None
            if is_own and present != own[r]:
                problem = "computes some rows of its own block only"
            elif len(due) > 1:
                problem = "receives two blocks for one step"
            elif t and due and (is_own or due[0] != present):
                problem = f"the rows of {due[0][0]} are due and not used"
            elif present[1] and not is_own and present not in due:
                problem = f"the block of {present[0]} has not arrived"
            for sent in step.sends:
                if (sent.owner, sent.rows) != present and not (
                    sent.owner == r and _holds(own[r][1], sent.rows)
                ):
                    problem = f"sends {_shown(sent)}, which it does not hold"
            if problem:
                raise ScheduleError(f"{name} step {t}, ring position {r}: {problem}")
            for transfer in step.receives:
                arrives.setdefault(transfer.due, []).append((transfer.owner, transfer.rows))


def _holds(whole: Rows, part: Rows) -> bool:
    return all(any(w.start <= p.start < p.stop <= w.stop for w in whole) for p in part)


def _follow_gradients(backward: Steps) -> None:
    """Each position's share of each block's gradient reaches the block's owner exactly once."""
    degree = len(backward)
    # Shares of a gradient as bits: bit r is the share of position r.
    gathered, computed = [0] * degree, [0] * degree
    due: list[dict[int, int]] = [{} for _ in range(degree)]
    for t in range(degree):
        for r, of_rank in enumerate(backward):
            step = of_rank[t]
            owner, rows = _present(step)
            arrived, own_share = due[r].pop(t, 0), (1 << r) if step.bands else 0
            computed[owner] |= own_share
            shares = arrived | own_share
            problem = None
            if arrived & own_share:
                problem = "its share of a gradient is added twice"
            elif owner == r:
                if gathered[r] & shares:
                    problem = "a share of a gradient is added twice"
                gathered[r] |= shares
                if step.gradient_sends:
                    problem = "sends away the gradient of its own block"
            elif len(step.gradient_sends) != (1 if rows else 0):
                problem = "does not send on the gradient of its block"
            else:
                for sent in step.gradient_sends:
                    problem = _passed_on(backward, sent, (owner, rows), shares, gathered, due)
            if problem:
                raise ScheduleError(f"backward step {t}, ring position {r}: {problem}")
    for owner in range(degree):
        if gathered[owner] != computed[owner]:
            raise ScheduleError(f"backward: a gradient of the block of {owner} does not come home")


def _passed_on(
    backward: Steps,
    sent: Transfer,
    present: Block,
    shares: int,
    gathered: list[int],
    due: list[dict[int, int]],
) -> str | None:
    """Add shares of a gradient to those of the block that they reach, or say what is wrong."""
    owner, peer = present[0], sent.peer
    if (sent.owner, sent.rows) != present:
        return "sends the gradient of rows that are not present"
    target = backward[peer][sent.due]
    if peer == owner:
        reached = gathered[owner]
        gathered[owner] |= shares
    elif (target.kv_owner, target.kv_rows) == present:
        reached = due[peer].get(sent.due, 0)
        due[peer][sent.due] = reached | shares
    else:
        return (
            f"the gradient of the block of {owner} reaches {peer} beside that of {target.kv_owner}"
        )
    return "a share of a gradient is added twice" if reached & shares else None
