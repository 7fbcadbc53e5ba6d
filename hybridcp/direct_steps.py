"""Steps of the direct exchange: each position gets from each other only the rows that it sees.

At distance d position r receives from r - d the rows that its queries see, and sends r + d those
that it sees; positions with nothing in common exchange nothing. A sliding window costs a halo,
packed documents only what crosses a shard's edge. Backward: distances in reverse, beginning with
the rows that arrived last; the gradient of rows goes straight back to their owner.
"""

from collections.abc import Mapping

from hybridcp.bands import Band
from hybridcp.steps import Rows, Step, Transfer, packed, some


def direct_forward(
    position: int,
    degree: int,
    bands: Mapping[int, tuple[Band, ...]],
    needed: Mapping[int, Rows],
    seen: Mapping[int, Rows],
) -> tuple[Step, ...]:
    """The R steps of one position.

    Args:
        position: ring position.
        degree: R.
        bands: what its queries see, in the local rows of each owner.
        needed: the rows of each owner that they see; of the own block, all.
        seen: own rows that the queries of each other position see.
    """
    steps = []
    for t in range(degree):
        owner = (position - t) % degree
        to, source = (position + t + 1) % degree, (position - t - 1) % degree
        travels = t + 1 < degree
        steps.append(
            Step(
                owner,
                needed.get(owner, ()),
                packed(bands.get(owner, ()), needed.get(owner, ())),
                some(Transfer(to, position, seen.get(to, ()) if travels else (), t + 1)),
                some(Transfer(source, source, needed.get(source, ()) if travels else (), t + 1)),
            )
        )
    return tuple(steps)


def direct_backward(
    position: int,
    degree: int,
    bands: Mapping[int, tuple[Band, ...]],
    needed: Mapping[int, Rows],
    seen: Mapping[int, Rows],
) -> tuple[Step, ...]:
    """The R steps of one position; arguments as in `direct_forward`."""
    steps = []
    for t in range(degree):
        distance = degree - 1 - t
        owner, back_from = (position - distance) % degree, (position + distance) % degree
        # The block of distance d - 1 travels during the step of distance d; own needs none.
        to, source = (position + distance - 1) % degree, (position - distance + 1) % degree
        travels = distance > 1
        rows, back = (needed.get(owner, ()), seen.get(back_from, ())) if distance else ((), ())
        steps.append(
            Step(
                owner,
                needed.get(owner, ()),
                packed(bands.get(owner, ()), needed.get(owner, ())),
                some(Transfer(to, position, seen.get(to, ()) if travels else (), t + 1)),
                some(Transfer(source, source, needed.get(source, ()) if travels else (), t + 1)),
                some(Transfer(owner, owner, rows, t + 1)),
                some(Transfer(back_from, position, back, t + 1)),
            )
        )
    return tuple(steps)
