"""`Layout`: how the ranks of one context-parallel group share a sequence. The saved artefact.

`hybridcp plan --out FILE` writes it, `HybridAttention` runs it; there is no second option to
keep in step. Context-parallel rank = ring_rank * U + ulysses_rank for `order: ulysses_inner`
(Ulysses ranks are neighbours, on the fast links), ulysses_rank * R + ring_rank for
`order: ring_inner`.
"""

from pathlib import Path
from typing import Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from hybridcp.balance import balanced
from hybridcp.errors import LayoutError
from hybridcp.masks import AttentionMask
from hybridcp.sharding import Sharding, ShardingName, check_sizes, make_sharding
from hybridcp.yaml_files import explain, read_yaml

Order = Literal["ulysses_inner", "ring_inner"]
Exchange = Literal["ring", "direct", "allgather"]


class Layout(BaseModel):
    """Degrees and sharding of one context-parallel group.

        layout = Layout(ulysses_degree=8, ring_degree=32)      # 256 ranks
        layout.save("layout.yaml"); Layout.load("layout.yaml") == layout

    Raises:
        LayoutError: an unknown key, a degree that is not a whole number ≥ 1, or an
            `inner_ring_size` that does not divide the ring or goes with another exchange.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    version: Literal[1] = Field(1, description="Version of this file format.")
    ulysses_degree: int = Field(
        ge=1, description="U: ranks that exchange heads for tokens by All-to-All."
    )
    ring_degree: int = Field(ge=1, description="R: positions that pass keys and values around.")
    order: Order = Field(
        "ulysses_inner", description="Which axis has consecutive ranks: the Ulysses or the ring."
    )
    sharding: ShardingName = Field(
        "zigzag",
        description="How tokens are dealt to ring positions: zigzag levels causal work, balanced "
        "the work of any mask.",
    )
    exchange: Exchange = Field(
        "ring",
        description="How keys and values travel: the whole block around the ring; direct: to "
        "each position only the rows that it sees; allgather: all to all at once.",
    )
    inner_ring_size: int | None = Field(
        None,
        ge=2,
        description="Double ring: positions of one inner ring, a divisor of ring_degree; blocks go "
        "around it before they hop to the next.",
    )

    def __init__(self, **data: Any) -> None:
        try:
            super().__init__(**data)
        except ValidationError as problem:
            raise LayoutError(explain(problem, type(self))) from None

    @model_validator(mode="after")
    def _check_inner_ring(self) -> Self:
        size = self.inner_ring_size
        if size is None:
            return self
        if self.exchange != "ring":
            raise ValueError(
                f"inner_ring_size {size} splits the ring of exchange 'ring', but exchange is "
                f"{self.exchange!r}; leave inner_ring_size out"
            )
        if self.ring_degree % size or size == self.ring_degree:
            legal = [d for d in _divisors(self.ring_degree) if 1 < d < self.ring_degree]
            can_be = f"it can be {_listed(legal)}" if legal else "no size is, so leave it out"
            raise ValueError(
                f"inner_ring_size must divide ring_degree {self.ring_degree} and be smaller, got "
                f"{size}; {can_be}"
            )
        return self

    @property
    def cp_degree(self) -> int:
        """P = U · R, number of ranks that share one sequence."""
        return self.ulysses_degree * self.ring_degree

    def rank_of(self, ring_rank: int, ulysses_rank: int) -> int:
        """Context-parallel rank at these coordinates."""
        if self.order == "ulysses_inner":
            return ring_rank * self.ulysses_degree + ulysses_rank
        return ulysses_rank * self.ring_degree + ring_rank

    def coordinates(self, cp_rank: int) -> tuple[int, int]:
        """(ring_rank, ulysses_rank) of a context-parallel rank; undoes `rank_of`."""
        if self.order == "ulysses_inner":
            return divmod(cp_rank, self.ulysses_degree)
        ulysses_rank, ring_rank = divmod(cp_rank, self.ring_degree)
        return ring_rank, ulysses_rank

    def shard(self, seq_len: int, mask: AttentionMask | None = None) -> Sharding:
        """Which of `seq_len` global tokens each ring position and rank holds.

        Args:
            seq_len: N, global tokens.
            mask: allowed pairs. `balanced` needs it; other shardings do not depend on it.

        Raises:
            LayoutError: `seq_len` below 1, or a balanced layout without a mask.
            MaskError: the mask of a balanced layout does not fit `seq_len`.
        """
        if self.sharding == "balanced" and mask is not None:
            check_sizes(seq_len, self.ring_degree, self.ulysses_degree)
            return balanced(seq_len, self.ring_degree, self.ulysses_degree, mask)
        return make_sharding(
            self.sharding,
            seq_len=seq_len,
            ring_degree=self.ring_degree,
            ulysses_degree=self.ulysses_degree,
        )

    def check_ranks(self, ranks: int) -> None:
        """Raise unless the layout uses exactly this many ranks.

        Raises:
            LayoutError: naming degrees that would fit.
        """
        if self.cp_degree == ranks:
            return
        product = f"{self.ulysses_degree} × {self.ring_degree} = {self.cp_degree}"
        message = f"ulysses_degree × ring_degree = {product}, but the group has {ranks} ranks"
        if ranks >= 1:
            nearest = max((u for u in _divisors(ranks) if u <= self.ulysses_degree), default=1)
            message += f"; ulysses_degree={nearest}, ring_degree={ranks // nearest} would fit"
        raise LayoutError(message)

    def check_heads(self, heads: int, kv_heads: int) -> None:
        """Raise unless `heads` query heads over `kv_heads` key/value heads can be split U ways.

        U need not divide the heads: shares then differ by one, and ranks with fewer wait.

        Raises:
            LayoutError: the constraint and the legal degrees.
        """
        if heads < 1 or kv_heads < 1 or heads % kv_heads:
            raise LayoutError(
                f"heads must be a multiple of kv_heads and both ≥ 1, got {heads} heads and "
                f"{kv_heads} kv_heads"
            )
        if self.ulysses_degree > heads:
            legal = [u for u in _divisors(self.cp_degree) if u <= heads]
            raise LayoutError(
                f"ulysses_degree {self.ulysses_degree} is above the {heads} heads (with tensor "
                f"parallelism: heads per tp rank), so some ranks would have none; over "
                f"{self.cp_degree} ranks it can be {_listed(legal)}, and ring_degree the rest"
            )

    def save(self, path: str | Path, comment: str = "") -> None:
        """Write the layout as YAML, `comment` in front as `#` lines.

        Raises:
            LayoutError: the file cannot be written.
        """
        header = "".join(f"# {line}\n" for line in comment.splitlines())
        text = header + yaml.safe_dump(self.model_dump(exclude_none=True), sort_keys=False)
        try:
            Path(path).write_text(text, encoding="utf-8")
        except OSError as reason:
            raise LayoutError(f"cannot write {path}: {reason.strerror or reason}") from None

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a layout file.

        Raises:
            LayoutError: the file is missing, not YAML, or holds an unknown key or a bad value.
        """
        path = Path(path)
        data = read_yaml(path, "layout", LayoutError)
        try:
            return cls(**data)
        except LayoutError as problem:
            raise LayoutError(f"{path}: {problem}") from None


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def _listed(numbers: list[int]) -> str:
    words = [str(number) for number in numbers]
    return " or ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else words[0]
