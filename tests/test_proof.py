"""The proof accepts every schedule that hybridcp makes, and bites whatever is changed in one."""

import time
from itertools import product
from typing import get_args

import pytest

from hybridcp.errors import ScheduleError
from hybridcp.layout import Exchange, Layout
from hybridcp.masks import Band, causal, documents, full, sliding_window
from hybridcp.proof import check
from hybridcp.schedule import Schedule
from hybridcp.sharding import TokenRange
from hybridcp.steps import Transfer

N, RING = 48, 4


def make(mask=None, sharding="zigzag", ring=RING, n=N, exchange="ring"):
    """A schedule; of a double ring of inner rings of two if `exchange` is "double"."""
    layout = Layout(ulysses_degree=2, ring_degree=ring, sharding=sharding)
    double = exchange == "double" and ring > 2 and ring % 2 == 0
    return Schedule(
        layout.shard(n),
        causal() if mask is None else mask,
        "ring" if exchange == "double" else exchange,
        inner_ring_size=2 if double else None,
    )


class Changed(Schedule):
    """A schedule of which one part is wrong.

    `bands(ring_rank, {owner: bands})` and `steps(name, ring_rank, steps)` return what to put in
    place of the right ones.
    """

    def __init__(self, schedule, bands=None, steps=None):
        super().__init__(
            schedule.sharding,
            schedule.mask,
            schedule.exchange,
            inner_ring_size=schedule.inner_ring_size,
        )
        self._change_bands = bands
        self._change_steps = steps

    def bands_between(self, ring_rank):
        found = super().bands_between(ring_rank)
        return self._change_bands(ring_rank, dict(found)) if self._change_bands else found

    def forward_steps(self, ring_rank):
        return self._changed("forward", ring_rank, super().forward_steps(ring_rank))

    def backward_steps(self, ring_rank):
        return self._changed("backward", ring_rank, super().backward_steps(ring_rank))

    def _changed(self, name, ring_rank, steps):
        if self._change_steps is None:
            return steps
        return tuple(self._change_steps(name, ring_rank, list(steps)))


def refused(message, schedule=None, **change):
    with pytest.raises(ScheduleError, match=message):
        check(Changed(schedule or make(), **change))


MASKS = {
    "full": full(),
    "causal": causal(),
    "window": sliding_window(5, 0),
    "two-sided": sliding_window(2, 9),
    "documents": causal() & documents([20, 1, 27]),
}


@pytest.mark.parametrize("exchange", [*get_args(Exchange), "double"])
@pytest.mark.parametrize("sharding", ["contiguous", "zigzag"])
@pytest.mark.parametrize("name", MASKS)
def test_accepts_every_schedule_of_ours(name, sharding, exchange):
    for ring in (1, 2, 3, 4, 6, 7):
        report = check(make(MASKS[name], sharding, ring, exchange=exchange))
        assert report.pairs == MASKS[name].pairs(N, N)
        assert report.hops <= ring * (ring - 1)
        assert exchange in ("direct", "allgather") or report.hops == ring * (ring - 1)
        assert report.busiest_share >= 1


def test_accepts_odd_lengths():
    for n, ring, sharding in product((1, 2, 3, 5, 13), (1, 2, 3, 4), ("contiguous", "zigzag")):
        assert check(make(None, sharding, ring, n)).pairs == n * (n + 1) // 2


def test_reports_how_uneven_the_work_is():
    assert check(make(causal())).busiest_share == 1.0
    contiguous = check(make(causal(), "contiguous"))
    # The last quarter of 48 rows has 37 + … + 48 pairs of 1176.
    assert contiguous.busiest_share == pytest.approx(sum(range(37, 49)) * 4 / 1176)
    assert check(make(causal())).bands == RING * RING


def test_an_unchanged_copy_passes():
    assert check(Changed(make())) == check(make())


# What is computed.


def on_rank(rank, change):
    def changed(ring_rank, found):
        return change(found) if ring_rank == rank else found

    return changed


@pytest.mark.parametrize("rank", range(RING))
@pytest.mark.parametrize("owner", range(RING))
def test_bites_a_dropped_band(rank, owner):
    refused(
        "pairs are computed, but the mask allows", bands=on_rank(rank, lambda f: f | {owner: ()})
    )


def edited(owner, edit):
    """Replace the first band of an owner by others."""
    return lambda found: found | {owner: (*edit(found[owner][0]), *found[owner][1:])}


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda b: [b, b], "compute a pair twice"),
        (lambda b: [b._replace(hi=b.hi + 1)], "leaves the mask"),
        (lambda b: [b._replace(hi=b.hi - 1)], "pairs are computed"),
        (lambda b: [b._replace(lo=b.hi - 2)], "pairs are computed"),
        (lambda b: [b._replace(q1=b.q1 - 1)], "pairs are computed"),
        (lambda b: [b._replace(k0=b.k0 + 1)], "pairs are computed"),
        (lambda b: [b.shifted(1, 1)], "reaches rows|leaves the mask"),
        (lambda b: [b._replace(q1=b.q1 + 3)], "reaches rows"),
        (lambda b: [b._replace(k1=b.k1 + 3, hi=b.hi + 3)], "reaches rows|leaves the mask"),
        (lambda b: [b, Band(0, 1, 11, 12)], "leaves the mask"),
    ],
    ids=[
        "twice",
        "window+1",
        "window-1",
        "window-cut",
        "row-lost",
        "key-lost",
        "shifted",
        "rows-not-held",
        "keys-not-held",
        "one-pair-more",
    ],
)
@pytest.mark.parametrize("rank", [0, 3])
def test_bites_a_changed_band(rank, edit, message):
    refused(message, bands=on_rank(rank, edited(rank, edit)))


def test_bites_bands_of_another_position():
    def rotated(found):
        return {owner: found[(owner + 1) % RING] for owner in range(RING)}

    refused("leaves the mask|pairs are computed", bands=on_rank(1, rotated))


def test_bites_a_pair_moved_from_one_position_to_another():
    """The total is right: one pair is computed twice and one not at all."""
    schedule = make(full(), "contiguous")

    def changed(ring_rank, found):
        if ring_rank == 0:
            return found | {1: (Band(0, 11, 0, 12), Band(11, 12, 0, 11))}
        if ring_rank == 1:
            return found | {1: (Band(0, 12, 0, 12), Band(11, 12, 11, 12))}
        return found

    refused("compute a pair twice", schedule, bands=changed)


# Where blocks are, and who sends.


def on_step(name, rank, step, **changes):
    def changed(pass_name, ring_rank, steps):
        if (pass_name, ring_rank) == (name, rank):
            steps[step] = steps[step]._replace(**changes)
        return steps

    return changed


PASSES = ["forward", "backward"]
EXCHANGES = ["ring", "direct", "double"]
FIELDS = ["sends", "receives", "gradient_sends", "gradient_receives"]


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("name", PASSES)
@pytest.mark.parametrize("rank", range(RING))
@pytest.mark.parametrize("step", range(RING))
def test_bites_a_wrong_owner(name, rank, step, exchange):
    schedule = make(exchange=exchange)
    right = getattr(schedule, f"{name}_steps")(rank)[step].kv_owner
    change = on_step(name, rank, step, kv_owner=(right + 1) % RING)
    refused("visits the blocks", schedule, steps=change)


def wrongs(transfers):
    """Ways in which one message can be wrong, and one too many."""
    extra = [Transfer(peer, 0, (TokenRange(0, 3),), due=3) for peer in range(RING)]
    found = [(*transfers, more) for more in extra]
    for i, transfer in enumerate(transfers):
        found += [(*transfers[:i], *wrong, *transfers[i + 1 :]) for wrong in wrong_ways(transfer)]
    return found


def wrong_ways(transfer):
    """None, or one that is wrong, in the place of a message."""
    start, stop = transfer.rows[0]
    cut = (TokenRange(start, stop - 1), *transfer.rows[1:]) if stop - start > 1 else ()
    moved = tuple(TokenRange(a + 1, b + 1) for a, b in transfer.rows)
    peers = [RING, -1, *(p for p in range(RING) if p != transfer.peer)]
    changes = [
        {"rows": cut},
        {"rows": moved},
        *({"peer": peer} for peer in peers),
        *({"owner": owner} for owner in range(RING) if owner != transfer.owner),
        *({"due": due} for due in range(-1, RING + 1) if due != transfer.due),
    ]
    return [(), *((transfer._replace(**change),) for change in changes)]


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("name", PASSES)
def test_bites_every_wrong_message(name, mask, exchange):
    """Each message of each step: left out, cut, moved, to another, or one too many."""
    schedule = make(mask, exchange=exchange)
    tried = 0
    for rank, step, field in product(range(RING), range(RING), FIELDS):
        right = getattr(getattr(schedule, f"{name}_steps")(rank)[step], field)
        for wrong in wrongs(right):
            with pytest.raises(ScheduleError):
                change = on_step(name, rank, step, **{field: wrong})
                check(Changed(schedule, steps=change))
            tried += 1
    assert tried >= 4 * RING * RING * len(FIELDS)


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("name", PASSES)
@pytest.mark.parametrize("pair", [(0, 1), (1, 2), (2, 3), (0, 3)])
def test_bites_swapped_steps(name, pair, exchange):
    def changed(pass_name, ring_rank, steps):
        if (pass_name, ring_rank) == (name, 1):
            a, b = pair
            steps[a], steps[b] = steps[b], steps[a]
        return steps

    with pytest.raises(ScheduleError):
        check(Changed(make(exchange=exchange), steps=changed))


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("name", PASSES)
@pytest.mark.parametrize("fields", [FIELDS[:2], FIELDS[2:]], ids=["blocks", "gradients"])
def test_bites_a_hop_that_nobody_makes(name, fields, exchange):
    """Left out on both sides, so every send still meets its receive."""
    schedule = make(full(), exchange=exchange)
    for hop in range(RING):
        if not getattr(getattr(schedule, f"{name}_steps")(0)[hop], fields[0]):
            continue

        def changed(pass_name, _, steps, hop=hop):
            if pass_name == name:
                steps[hop] = steps[hop]._replace(**dict.fromkeys(fields, ()))
            return steps

        refused("has not arrived|does not send", schedule, steps=changed)


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("name", PASSES)
def test_bites_blocks_that_go_the_other_way(name, exchange):
    def changed(pass_name, _, steps):
        if pass_name == name:
            return [s._replace(sends=s.receives, receives=s.sends) for s in steps]
        return steps

    with pytest.raises(ScheduleError):
        check(Changed(make(full(), exchange=exchange), steps=changed))


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_bites_a_backward_that_computes_other_bands(exchange):
    refused(
        "forward and backward compute different bands",
        make(exchange=exchange),
        steps=on_step("backward", 2, 1, bands=()),
    )


@pytest.mark.parametrize("name", PASSES)
@pytest.mark.parametrize("rank", range(RING))
def test_bites_what_is_wrong_in_an_all_gather(rank, name):
    schedule = make(exchange="allgather")
    (step,) = schedule.forward_steps(rank)
    band = step.bands[-1]
    for change, message in (
        ({"kv_owner": 0}, "one step with every block"),
        ({"kv_rows": (TokenRange(0, N - 1),)}, "gathered rows are not all"),
        ({"bands": step.bands[:-1]}, "compute different bands"),
    ):
        refused(message, schedule, steps=on_step(name, rank, 0, **change))
    for bands, message in (
        (step.bands[:-1], "pairs are computed"),
        ((*step.bands, band), "compute a pair twice"),
        ((*step.bands[:-1], band._replace(hi=band.hi + 1)), "leaves the mask"),
        ((*step.bands[:-1], band._replace(q1=band.q1 + 1, hi=band.hi - 1)), "reaches rows"),
    ):

        def changed(_, ring_rank, steps, bands=bands):
            return [s._replace(bands=bands) for s in steps] if ring_rank == rank else steps

        refused(message, schedule, steps=changed)


def test_bites_a_block_that_is_visited_twice():
    """Without transfers a position holds its own block: consistent, and useless."""

    def changed(pass_name, ring_rank, steps):
        if pass_name == "backward":
            return steps
        return [s._replace(kv_owner=ring_rank, sends=(), receives=()) for s in steps]

    refused("visits the blocks", steps=changed)


@pytest.mark.parametrize("name", PASSES)
def test_bites_a_missing_step(name):
    def changed(pass_name, ring_rank, steps):
        return steps[:-1] if (pass_name, ring_rank) == (name, 1) else steps

    refused(f"{RING - 1} steps in a ring of {RING}", steps=changed)


def test_bites_a_hop_that_nothing_uses():
    def changed(pass_name, ring_rank, steps):
        hop = {"sends": steps[0].sends, "receives": steps[0].receives}
        return [*steps[:-1], steps[-1]._replace(**hop)] if pass_name == "forward" else steps

    refused("no step is left to use", steps=changed)


def test_a_million_tokens_on_256_ranks_are_proved_while_you_wait():
    layout = Layout(ulysses_degree=8, ring_degree=32)
    started = time.perf_counter()
    report = check(Schedule(layout.shard(1 << 20), causal()))
    assert time.perf_counter() - started < 2
    assert report.pairs == (1 << 20) * ((1 << 20) + 1) // 2
    assert (report.bands, report.hops, report.busiest_share) == (32 * 32, 32 * 31, 1.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        Layout(ulysses_degree=8, ring_degree=512),
        Layout(ulysses_degree=16, ring_degree=256, inner_ring_size=8),
        Layout(ulysses_degree=32, ring_degree=128, exchange="direct"),
        Layout(ulysses_degree=8, ring_degree=512, exchange="allgather"),
    ],
    ids=lambda layout: f"{layout.exchange}-{layout.ring_degree}",
)
def test_4096_ranks_are_proved(layout):
    tokens = 1 << 22
    report = check(Schedule.of_layout(layout, layout.shard(tokens), causal()))
    assert report.pairs == tokens * (tokens + 1) // 2
