import re

import pytest

from hybridcp.errors import ClusterError
from hybridcp.planner import load_cluster, plan

YAML = """
name: mine
overlap_fraction: 1
gpu:
  name: some GPU
  peak_tflops: {bf16: 100}
  memory_gib: 80
  memory_bandwidth_gb_per_s: 1000
  kernel_launch_us: 5
  multiprocessors: 100
  q_tile_rows: 128
  attention:
    - {head_dim: 128, forward_max: 0.5, forward_half_keys: 100,
       backward_max: 0.5, backward_half_queries: 100}
levels:
  - {name: node, size: 4, bandwidth_gb_per_s: 100, p2p_efficiency: 1, all_to_all_efficiency: 1,
     latency_us: 10}
  - {name: network, size: 3, bandwidth_gb_per_s: 10, p2p_efficiency: 1, all_to_all_efficiency: 1,
     latency_us: 20}
"""


def load_text(tmp_path, text):
    path = tmp_path / "mine.yaml"
    path.write_text(text, encoding="utf-8")
    return load_cluster(path)


def test_own_file(tmp_path):
    cluster = load_text(tmp_path, YAML)
    assert cluster.group_sizes == (4, 12)
    assert "levels.node.latency_us" in cluster.unsourced()
    assert plan(heads=8, ranks=12, seq_len="64k", cluster=tmp_path / "mine.yaml").best
    assert plan(heads=8, ranks=12, seq_len="64k", cluster=cluster).best


def test_a_source_covers_what_is_below_it(tmp_path):
    cluster = load_text(tmp_path, YAML + "sources: {levels: somewhere, gpu.attention: paper}\n")
    assert not [n for n in cluster.unsourced() if n.startswith(("levels.", "gpu.attention."))]
    assert "gpu.memory_gib" in cluster.unsourced()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("latency_us: 10", "latency_ms: 10", "latency_us"),
        ("size: 4,", "size: 4, rank_per_link: 2,", "did you mean ranks_per_link?"),
        ("memory_gib: 80\n", "memory_gib: 80\n  colour: red\n", "gpu.colour: unknown key"),
        ("memory_gib: 80", "memory_gib: lots", "gpu.memory_gib"),
        ("memory_gib: 80\n", "memory_gib: -1\n", "gpu.memory_gib"),
        ("overlap_fraction: 1\n", "overlap_fraction: 2\n", "overlap_fraction"),
        ("overlap_fraction: 1\n", "", "overlap_fraction is missing"),
        ("name: node, size: 4,", "name: node,", "level node lacks a size"),
        ("name: network", "name: node", "level names must differ"),
        ("{bf16: 100}", "{int4: 100}", "peak_tflops"),
    ],
)
def test_faults_are_named(tmp_path, old, new, message):
    assert old in YAML
    with pytest.raises(ClusterError, match=re.escape(message)) as error:
        load_text(tmp_path, YAML.replace(old, new, 1))
    assert "mine.yaml" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_source_of_nothing(tmp_path):
    with pytest.raises(ClusterError, match="did you mean levels.node.latency_us"):
        load_text(tmp_path, YAML + "sources: {levels.node.latency_ms: guess}\n")


def test_unknown_names():
    with pytest.raises(ClusterError, match=r"did you mean h100-8.*a100-8.*path to a YAML file"):
        load_cluster("h100_8")
    with pytest.raises(ClusterError, match="cannot read"):
        load_cluster("missing.yaml")


def test_frozen():
    cluster = load_cluster("h100-8")
    with pytest.raises(ValueError, match="frozen"):
        cluster.name = "other"
