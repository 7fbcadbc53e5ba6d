"""`Cluster`: the machines a plan is for, as data with units in names and a source for each number.

A cluster is its GPU and its link levels, inner to outer. YAML in (`load_cluster`), frozen
models out. Bandwidths are bytes one way: 1 GB/s = 1e9 bytes/s.
"""

from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from hybridcp.errors import ClusterError
from hybridcp.yaml_files import parse, read_yaml

DtypeName = Literal["bf16", "fp16", "fp32"]


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Level(_Strict):
    """Links between ranks that share this level but none inside it."""

    name: str = Field(description="What people call it: node, socket, network.")
    size: int | None = Field(
        None,
        ge=1,
        description="How many of the next inner level (ranks, for the innermost) it joins. Only "
        "the outermost may leave it out: as many as needed.",
    )
    bandwidth_gb_per_s: float = Field(gt=0, description="Of one link, one direction, nominal.")
    ranks_per_link: int = Field(1, ge=1, description="Consecutive ranks that share one such link.")
    p2p_efficiency: float = Field(
        gt=0, le=1, description="Share of the bandwidth that a neighbour send reaches."
    )
    all_to_all_efficiency: float = Field(
        gt=0, le=1, description="Share of the bandwidth that an All-to-All reaches."
    )
    latency_us: float = Field(ge=0, description="Of one message or collective, start to end.")


class AttentionEfficiency(_Strict):
    """Attention FLOP/s ÷ peak: `max * rows / (rows + half_rows)`, rows of the inner loop.

    Rows are the mean keys of a query in the forward pass, the mean queries of a key in the
    backward pass.
    """

    head_dim: int = Field(ge=1, description="The kernel's; smaller head dims are padded to it.")
    forward_max: float = Field(gt=0, le=1, description="Share of peak with endless rows.")
    forward_half_keys: float = Field(ge=0, description="Keys of a query at half of that.")
    backward_max: float = Field(gt=0, le=1, description="Share of peak with endless rows.")
    backward_half_queries: float = Field(ge=0, description="Queries of a key at half of that.")


class Gpu(_Strict):
    """What one rank computes with."""

    name: str
    peak_tflops: dict[DtypeName, float] = Field(description="Dense matrix peak by dtype.")
    memory_gib: float = Field(gt=0)
    memory_bandwidth_gb_per_s: float = Field(gt=0, description="Reads plus writes.")
    kernel_launch_us: float = Field(ge=0, description="Cost of one kernel call, whatever its size.")
    multiprocessors: int = Field(ge=1, description="Tiles that compute at the same time.")
    q_tile_rows: int = Field(ge=1, description="Query rows of one attention tile.")
    attention: tuple[AttentionEfficiency, ...] = Field(min_length=1)


class Cluster(_Strict):
    """A cluster description; see `layouts/clusters/` for examples.

    Raises:
        pydantic.ValidationError: a field is unknown, missing or out of range. `load_cluster`
            turns it into one sentence.
    """

    version: Literal[1] = Field(1, description="Version of this file format.")
    name: str
    overlap_fraction: float = Field(
        ge=0, le=1, description="Share of compute time under which a transfer makes progress."
    )
    gpu: Gpu
    levels: tuple[Level, ...] = Field(min_length=1, description="Inner to outer.")
    sources: dict[str, str] = Field(
        default_factory=dict,
        description="Where each number is from. Keys are dotted fields, levels by name and "
        "attention by head_dim: `levels.node.latency_us`. A key covers what lies below it.",
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        for level in self.levels[:-1]:
            if level.size is None:
                raise ValueError(f"level {level.name} lacks a size; only the outermost may")
        names = [level.name for level in self.levels]
        if len(set(names)) < len(names):
            raise ValueError(f"level names must differ, got {', '.join(names)}")
        numbers = self.numbers()
        for key in self.sources:
            if not any(_covers(key, number) for number in numbers):
                near = get_close_matches(key, numbers, n=1)
                hint = f"; did you mean {near[0]}?" if near else ""
                raise ValueError(f"sources: {key} is no number of this file{hint}")
        return self

    def numbers(self) -> dict[str, float]:
        """Every number by dotted field name, as `sources` names them."""
        return dict(_numbers("", self))

    def unsourced(self) -> list[str]:
        """The numbers without a source, by dotted field name."""
        return [n for n in self.numbers() if not any(_covers(key, n) for key in self.sources)]

    @property
    def group_sizes(self) -> tuple[int | None, ...]:
        """Ranks inside one group of each level; None: as many as there are."""
        sizes: list[int | None] = []
        ranks: int | None = 1
        for level in self.levels:
            ranks = None if ranks is None or level.size is None else ranks * level.size
            sizes.append(ranks)
        return tuple(sizes)


def load_cluster(name_or_path: str | Path) -> Cluster:
    """The cluster of a preset name (`h100-8`) or of a YAML file.

    Raises:
        ClusterError: no such preset or file, or the file does not hold a cluster.
    """
    text = str(name_or_path)
    path = next((p for p in _preset_files() if p.stem == text), None)
    if path is None:
        if not text.endswith((".yaml", ".yml")) and not Path(text).is_file():
            names = preset_names()
            near = get_close_matches(text, names, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise ClusterError(
                f"no cluster is named {text!r}; {hint}There are {', '.join(names)}, or give a "
                "path to a YAML file"
            )
        path = Path(text)
    return parse(read_yaml(path, "cluster", ClusterError), Cluster, str(path), ClusterError)


def preset_names() -> list[str]:
    """Names that `load_cluster` knows."""
    return [path.stem for path in _preset_files()]


def _preset_files() -> list[Path]:
    # In a wheel the data lies inside the package, in a source checkout beside it.
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "layouts" / "clusters", package.parent / "layouts" / "clusters"):
        if folder.is_dir():
            return sorted(folder.glob("*.yaml"))
    return []


def _covers(key: str, number: str) -> bool:
    return number == key or number.startswith(f"{key}.")


def _numbers(prefix: str, value: Any) -> Iterator[tuple[str, float]]:
    if isinstance(value, BaseModel):
        for name in type(value).model_fields:
            # A file's own version, and defaults it did not state, are no measurements.
            if name in value.model_fields_set - {"version", "sources"}:
                yield from _numbers(f"{prefix}{name}.", getattr(value, name))
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from _numbers(f"{prefix}{name}.", item)
    elif isinstance(value, tuple):
        for item in value:
            label = item.name if isinstance(item, Level) else item.head_dim
            yield from _numbers(f"{prefix}{label}.", item)
    elif isinstance(value, int | float):
        yield prefix.rstrip("."), value
