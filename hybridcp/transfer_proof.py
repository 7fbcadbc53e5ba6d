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
Meeting = tuple[int, int, int]
"""Step, sender, receiver."""


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
    for what, going, coming in (
        ("block", [[s.sends for s in r] for r in steps], [[s.receives for s in r] for r in steps]),
        (
            "gradient",
            [[s.gradient_sends for s in r] for r in steps],
            [[s.gradient_receives for s in r] for r in steps],
        ),
    ):
        sent = _by_meeting(f"{name}, a {what}", going, sender_first=True)
        received = _by_meeting(f"{name}, a {what}", coming, sender_first=False)
        for meeting in sent.keys() | received.keys():
            given, taken = sent.get(meeting), received.get(meeting)
            if given is None or taken is None or not _is_same(given, taken):
                t, source, to = meeting
                raise ScheduleError(
                    f"{name} step {t}: ring position {source} sends {to} a {what}, "
                    f"{_shown(given)}, but {to} receives {_shown(taken)}"
                )


def _by_meeting(
    what: str, transfers: Sequence[Sequence[tuple[Transfer, ...]]], *, sender_first: bool
) -> dict[Meeting, Transfer]:
    degree = len(transfers)
    found: dict[Meeting, Transfer] = {}
    for r, of_rank in enumerate(transfers):
        for t, of_step in enumerate(of_rank):
            for transfer in of_step:
                peer = transfer.peer
                here = f"{what} at step {t}, ring position {r}"
                if peer == r or not 0 <= peer < degree:
                    raise ScheduleError(f"{here}: {peer} is no other position of the ring")
                if not transfer.rows:
                    raise ScheduleError(f"{here}: nothing is sent or received as a message")
                if not t < transfer.due < degree:
                    raise ScheduleError(
                        f"{here}: no step is left to use it, it is due at {transfer.due}"
                    )
                meeting = (t, r, peer) if sender_first else (t, peer, r)
                # One message between two positions at a time: their order is never in doubt.
                if meeting in found:
                    raise ScheduleError(f"{here}: two messages to or from {peer}")
                found[meeting] = transfer
    return found


def _is_same(sent: Transfer, received: Transfer) -> bool:
    return (sent.owner, sent.rows, sent.due) == (received.owner, received.rows, received.due)


def _shown(transfer: Transfer | None) -> str:
    if transfer is None:
        return "nothing"
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
            here = f"{name} step {t}, ring position {r}"
            due = arrives.pop(t, [])
            present = _present(step)
            is_own = present[0] == r
            if is_own and present != own[r]:
                raise ScheduleError(f"{here}: computes rows of its own block only")
            if t and any(block != present for block in due):
                raise ScheduleError(f"{here}: the rows of {due[0][0]} are due and not used")
            if t and is_own and due:
                raise ScheduleError(f"{here}: receives the block that it owns")
            if len(due) > 1:
                raise ScheduleError(f"{here}: receives a block twice")
            if present[1] and not is_own and present not in due:
                raise ScheduleError(f"{here}: the block of {present[0]} has not arrived")
            for transfer in step.sends:
                _check_source(here, transfer, present, own[r])
            for transfer in step.receives:
                arrives.setdefault(transfer.due, []).append((transfer.owner, transfer.rows))


def _check_source(here: str, sent: Transfer, present: Block, own: Block) -> None:
    """A position sends the block that is present, or rows of its own."""
    if (sent.owner, sent.rows) == present:
        return
    if sent.owner != own[0] or not _holds(own[1], sent.rows):
        raise ScheduleError(f"{here}: sends {_shown(sent)}, which it does not hold")


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
            here = f"backward step {t}, ring position {r}"
            own_share = (1 << r) if step.bands else 0
            computed[owner] |= own_share
            shares = _joined(here, due[r].pop(t, 0), own_share)
            if owner == r:
                gathered[r] = _joined(here, gathered[r], shares)
                if step.gradient_sends:
                    raise ScheduleError(f"{here}: sends away the gradient of its own block")
                continue
            if len(step.gradient_sends) != (1 if rows else 0):
                raise ScheduleError(f"{here}: does not send on the gradient of its block")
            for sent in step.gradient_sends:
                if (sent.owner, sent.rows) != (owner, rows):
                    raise ScheduleError(f"{here}: sends the gradient of rows that are not present")
                if sent.peer == owner:
                    gathered[owner] = _joined(here, gathered[owner], shares)
                    continue
                target = _present(backward[sent.peer][sent.due])
                if target != (owner, rows):
                    raise ScheduleError(
                        f"{here}: the gradient of the block of {owner} reaches {sent.peer} beside "
                        f"that of {target[0]}"
                    )
                waiting = due[sent.peer]
                waiting[sent.due] = _joined(here, waiting.get(sent.due, 0), shares)
    for owner in range(degree):
        if gathered[owner] != computed[owner]:
            raise ScheduleError(f"backward: a gradient of the block of {owner} does not come home")


def _joined(here: str, shares: int, others: int) -> int:
    if shares & others:
        raise ScheduleError(f"{here}: a share of a gradient is added twice")
    return shares | others
