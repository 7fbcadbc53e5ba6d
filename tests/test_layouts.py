"""Every file in layouts/ is read, checked and, for saved layouts, planned again."""

import json
import shlex
from pathlib import Path

import pytest

from hybridcp.cli import run
from hybridcp.layout import Layout
from hybridcp.masks import causal
from hybridcp.planner import load_cluster, plan, preset_names
from hybridcp.planner.cluster import Cluster
from hybridcp.proof import check
from hybridcp.schedule import Schedule

LAYOUTS = Path(__file__).parents[1] / "layouts"
CLUSTERS = sorted((LAYOUTS / "clusters").iterdir())
PLANS = sorted((LAYOUTS / "plans").iterdir())


@pytest.mark.parametrize("path", CLUSTERS, ids=lambda path: path.stem)
def test_cluster_file(path):
    cluster = load_cluster(path)
    assert path.suffix == ".yaml"
    assert cluster.name == path.stem
    assert cluster == load_cluster(path.stem)
    assert cluster.unsourced() == []
    first_line = path.read_text(encoding="utf-8").splitlines()[0]
    schema = first_line.removeprefix("# yaml-language-server: $schema=")
    assert (path.parent / schema).is_file()


def test_presets_are_the_files():
    assert preset_names() == [path.stem for path in CLUSTERS]
    assert {"a100-8", "h100-8", "h200-8", "b200-8", "cpu-laptop"} <= set(preset_names())


@pytest.mark.parametrize("name", preset_names())
@pytest.mark.parametrize("ranks", [1, 2, 3, 6, 8, 12, 72, 256, 257, 1000])
def test_every_preset_plans_any_number_of_ranks(name, ranks):
    cluster = load_cluster(name)
    room = cluster.group_sizes[-1]
    if room is not None and ranks > room:
        pytest.skip(f"{name} has {room} ranks")
    result = plan(heads=32, ranks=ranks, cluster=cluster, seq_len="64k")
    assert result.best.layout.cp_degree == ranks
    assert all(c.total_s > 0 for c in result.candidates)
    assert max(map(len, str(result).splitlines())) <= 100


@pytest.mark.parametrize("path", PLANS, ids=lambda path: path.stem)
def test_saved_plan(path, tmp_path):
    layout = Layout.load(path)
    command = path.read_text(encoding="utf-8").splitlines()[0].removeprefix("# hybridcp ")
    again = tmp_path / "again.yaml"
    assert run([*shlex.split(command), "--out", str(again)]) == 0
    assert again.read_text(encoding="utf-8") == path.read_text(encoding="utf-8")
    assert check(Schedule(layout.shard(4096), causal())).pairs == 4096 * 4097 // 2


def test_schema_is_current():
    schema = json.loads((LAYOUTS / "schema" / "cluster.schema.json").read_text(encoding="utf-8"))
    assert schema == Cluster.model_json_schema()
