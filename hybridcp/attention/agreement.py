"""Do all ranks make the same call? Asked before the first message of each new kind of call.

Ranks that disagree on a size, a dtype or a mask would send messages that nobody receives: a hang,
or a process that dies without a traceback. Here each rank sends the others a few hundred bytes that
say what it is about to do, or why it cannot, and all raise the same error.
"""

import json
from collections.abc import Hashable, Mapping
from typing import Literal, get_args

import torch

from hybridcp.distributed import ContextParallelGroups
from hybridcp.errors import HybridCPError, InputError
from hybridcp.layout import Layout

CheckAgreement = Literal["first", "always", "never"]
MESSAGE_BYTES = 8192
# In JSON a character takes at most six bytes.
MAX_PROBLEM = 1200
MAX_FACT = 80


class Agreement:
    """What the ranks of one module have agreed on so far.

    Args:
        layout: of the module, for naming ranks.
        groups: ring and Ulysses group.
        device: where messages of these groups live.
        mode: "first" asks at each new kind of call, "always" at every call, "never" not at all.

    Raises:
        InputError: an unknown mode.
    """

    def __init__(
        self,
        layout: Layout,
        groups: ContextParallelGroups,
        device: torch.device,
        mode: CheckAgreement,
    ) -> None:
        if mode not in get_args(CheckAgreement):
            names = ", ".join(map(repr, get_args(CheckAgreement)))
            raise InputError(f"check_agreement must be one of {names}, got {mode!r}")
        self._layout = layout
        self._groups = groups
        self._device = device
        self._mode = mode
        self._agreed: set[Hashable] = set()

    def covers(self, call: Hashable) -> bool:
        """Whether nothing has to be asked for this kind of call."""
        alone = self._layout.cp_degree == 1
        return alone or self._mode == "never" or (self._mode == "first" and call in self._agreed)

    def confirm(self, call: Hashable, facts: Mapping[str, str]) -> None:
        """Ask the other ranks whether they are about to do the same. A collective.

        Args:
            call: what `covers` will be asked for.
            facts: what must be equal on all ranks, by name, in words.

        Raises:
            InputError: on every rank the same, naming what differs, or what is wrong where.
        """
        shortened = {name: value[:MAX_FACT] for name, value in facts.items()}
        self._compare(self._exchange({"facts": shortened}))
        self._agreed.add(call)

    def refuse(self, problem: HybridCPError) -> None:
        """Tell the other ranks that this one cannot go on, then raise. A collective.

        Only while nothing has been agreed, or in mode "always": later the others may not ask, and
        raising at once is what ends them soonest.

        Raises:
            HybridCPError: `problem`, or where other ranks could go on, the error that all raise.
        """
        asks = self._mode == "always" or (self._mode == "first" and not self._agreed)
        if asks and self._layout.cp_degree > 1:
            self._compare(self._exchange({"problem": str(problem)[:MAX_PROBLEM]}))
        raise problem

    def _exchange(self, said: dict[str, object]) -> list[dict[str, object]]:
        """What each context-parallel rank says, in rank order."""
        text = json.dumps(said).encode()
        assert len(text) <= MESSAGE_BYTES
        message = torch.zeros((1, MESSAGE_BYTES), dtype=torch.uint8)
        message[0, : len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        gathered = message.to(self._device)
        for communicator in (self._groups.ulysses, self._groups.ring):
            pieces = communicator.all_gather(gathered, [gathered.size(0)] * communicator.size)
            gathered = torch.cat(pieces)
        by_position = gathered.cpu().view(self._layout.ring_degree, self._layout.ulysses_degree, -1)
        coordinates = map(self._layout.coordinates, range(self._layout.cp_degree))
        return [json.loads(bytes(by_position[at].tolist()).rstrip(b"\0")) for at in coordinates]

    def _compare(self, said: list[dict[str, object]]) -> None:
        problems = {rank: words["problem"] for rank, words in enumerate(said) if "problem" in words}
        if problems:
            if len(problems) < len(said):
                rank, problem = next(iter(problems.items()))
                raise InputError(
                    f"rank {rank} of {len(said)} cannot go on, so no rank does: {problem}"
                )
            return
        facts: list[dict[str, str]] = [words["facts"] for words in said]  # type: ignore[misc]
        for name in facts[0]:
            values = {of_rank[name] for of_rank in facts}
            if len(values) > 1:
                by_value = "; ".join(
                    f"{value} on {_ranks([r for r, f in enumerate(facts) if f[name] == value])}"
                    for value in sorted(values)
                )
                raise InputError(
                    f"the ranks of a sequence must make the same call, but {name} differs: "
                    f"{by_value}"
                )


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (", …" if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"
