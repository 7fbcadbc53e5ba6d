"""The saved artefact: what goes in comes out, and what is wrong is said in one sentence."""

import json
from pathlib import Path

import pytest

from hybridcp.balance import balanced
from hybridcp.errors import LayoutError, MaskError
from hybridcp.layout import Layout
from hybridcp.masks import causal, documents
from hybridcp.sharding import contiguous, zigzag

SCHEMA = Path(__file__).parent.parent / "layouts" / "schema" / "layout.schema.json"
LAYOUTS = [
    Layout(ulysses_degree=1, ring_degree=1),
    Layout(ulysses_degree=8, ring_degree=32),
    Layout(ulysses_degree=3, ring_degree=2, order="ring_inner", sharding="contiguous"),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=repr)
@pytest.mark.parametrize("comment", ["", "two lines\nof: comment"])
def test_saved_layouts_load_as_they_were(layout, comment, tmp_path):
    path = tmp_path / "layout.yaml"
    layout.save(path, comment)
    assert Layout.load(path) == layout
    assert Layout.load(str(path)) == layout
    if comment:
        assert path.read_text().startswith("# two lines\n# of: comment\nversion: 1\n")


def test_defaults_need_not_be_written(tmp_path):
    path = tmp_path / "layout.yaml"
    path.write_text("ulysses_degree: 2\nring_degree: 4\n")
    assert Layout.load(path) == Layout(ulysses_degree=2, ring_degree=4)


@pytest.mark.parametrize("order", ["ulysses_inner", "ring_inner"])
def test_coordinates_undo_rank_of(order):
    layout = Layout(ulysses_degree=3, ring_degree=4, order=order)
    seen = [layout.coordinates(rank) for rank in range(layout.cp_degree)]
    assert sorted(seen) == [(r, u) for r in range(4) for u in range(3)]
    assert [layout.rank_of(*at) for at in seen] == list(range(12))
    neighbours = seen[:2]
    inner = 1 if order == "ulysses_inner" else 0
    assert [at[inner] for at in neighbours] == [0, 1]
    assert neighbours[0][1 - inner] == neighbours[1][1 - inner]


def test_shards_as_its_sharding_says():
    assert Layout(ulysses_degree=2, ring_degree=3).shard(50) == zigzag(50, 3, 2)
    straight = Layout(ulysses_degree=2, ring_degree=3, sharding="contiguous")
    assert straight.shard(50) == contiguous(50, 3, 2)
    with pytest.raises(LayoutError, match="seq_len must be a whole number ≥ 1, got 0"):
        straight.shard(0)


def test_a_balanced_layout_shards_for_a_mask():
    mask = causal() & documents([30, 15, 5])
    layout = Layout(ulysses_degree=2, ring_degree=3, sharding="balanced")
    assert layout.shard(50, mask) == balanced(50, 3, 2, mask)
    with pytest.raises(LayoutError, match="depends on the mask: pass it"):
        layout.shard(50)
    with pytest.raises(LayoutError, match="seq_len must be a whole number ≥ 1, got 0"):
        layout.shard(0, mask)
    with pytest.raises(MaskError, match="sum to 50"):
        layout.shard(49, mask)


@pytest.mark.parametrize("name", ["contiguous", "zigzag"])
def test_other_layouts_shard_alike_for_every_mask(name):
    layout = Layout(ulysses_degree=2, ring_degree=3, sharding=name)
    assert layout.shard(50, documents([30, 15, 5])) == layout.shard(50)


def test_is_frozen():
    with pytest.raises(ValueError, match="frozen"):
        LAYOUTS[0].ring_degree = 2


GOOD = {"ulysses_degree": 2, "ring_degree": 2}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ring_degre": 2}, "ring_degre: unknown key; did you mean ring_degree?"),
        (
            {"zzz": 2},
            "zzz: unknown key; known keys: version, ulysses_degree, ring_degree, order, sharding",
        ),
        ({"ring_degree": True}, "ring_degree: input should be a valid integer, got True"),
        ({"ring_degree": 2.0}, "ring_degree: input should be a valid integer, got 2.0"),
        ({"ring_degree": "2"}, "ring_degree: input should be a valid integer, got '2'"),
        ({"ring_degree": None}, "ring_degree: input should be a valid integer, got None"),
        ({"ring_degree": 0}, "ring_degree: input should be greater than or equal to 1, got 0"),
        ({"ulysses_degree": -4}, "ulysses_degree: input should be greater than or equal to 1"),
        ({"order": "ulysses"}, "order: input should be 'ulysses_inner' or 'ring_inner'"),
        ({"sharding": "striped"}, "sharding: input should be 'contiguous'"),
        ({"version": 2}, "version: input should be 1, got 2"),
    ],
    ids=str,
)
def test_refuses_wrong_values_in_code_and_in_files(change, message, tmp_path):
    with pytest.raises(LayoutError) as caught:
        Layout(**{**GOOD, **change})
    assert str(caught.value).startswith(message) and "\n" not in str(caught.value)

    path = tmp_path / "layout.yaml"
    path.write_text(json.dumps({**GOOD, **change}))
    with pytest.raises(LayoutError) as caught:
        Layout.load(path)
    assert str(caught.value).startswith(f"{path}: {message}")


def test_refuses_a_missing_degree():
    with pytest.raises(LayoutError, match=r"^ring_degree is missing$"):
        Layout(ulysses_degree=2)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "holds nothing"),
        (b"# only a comment\n", "holds nothing"),
        (b"- 1\n- 2\n", "holds list"),
        (b"42\n", "holds int"),
        (b"ulysses_degree: [1\n", "not valid YAML"),
        (b"a: b: c\n", "not valid YAML"),
        (b"\xff\xfe\x00\x01binary\x80", "not a text file"),
        (b"\x00\x01", "not valid YAML"),
        (b"1: 2\n", "one is 1"),
        (b"!!python/object:os.system {}\n", "not valid YAML"),
    ],
    ids=[
        "empty",
        "comment",
        "list",
        "number",
        "unclosed",
        "nested",
        "binary",
        "control",
        "number-key",
        "object",
    ],
)
def test_files_that_are_no_layout(content, message, tmp_path):
    path = tmp_path / "layout.yaml"
    path.write_bytes(content)
    with pytest.raises(LayoutError) as caught:
        Layout.load(path)
    assert message in str(caught.value) and str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_files_that_cannot_be_read_or_written(tmp_path):
    missing = tmp_path / "none" / "layout.yaml"
    with pytest.raises(LayoutError, match=r"^cannot read the layout file .*No such file"):
        Layout.load(missing)
    with pytest.raises(LayoutError, match=r"^cannot read the layout file .*directory"):
        Layout.load(tmp_path)
    with pytest.raises(LayoutError, match=r"^cannot write .*No such file"):
        LAYOUTS[0].save(missing)


def test_check_ranks_names_degrees_that_fit():
    layout = Layout(ulysses_degree=4, ring_degree=3)
    layout.check_ranks(12)
    with pytest.raises(LayoutError) as caught:
        layout.check_ranks(8)
    assert str(caught.value) == (
        "ulysses_degree × ring_degree = 4 × 3 = 12, but the group has 8 ranks; "
        "ulysses_degree=4, ring_degree=2 would fit"
    )
    with pytest.raises(LayoutError, match="the group has 0 ranks$"):
        layout.check_ranks(0)


def test_check_heads_names_legal_degrees():
    layout = Layout(ulysses_degree=4, ring_degree=3)
    layout.check_heads(heads=8, kv_heads=1)
    with pytest.raises(LayoutError) as caught:
        layout.check_heads(heads=3, kv_heads=1)
    assert str(caught.value).startswith("ulysses_degree 4 is above the 3 heads")
    assert "over 12 ranks it can be 1, 2 or 3" in str(caught.value)
    layout.check_heads(heads=6, kv_heads=2)
    for heads, kv_heads in ((12, 8), (0, 1), (4, 0), (-4, -2)):
        with pytest.raises(LayoutError, match="heads must be a multiple of kv_heads"):
            layout.check_heads(heads, kv_heads)


def test_the_schema_is_the_committed_one():
    """Editors use the file to complete and check layouts; a change of it is a change of format."""
    schema = Layout.model_json_schema()
    assert schema == json.loads(SCHEMA.read_text()), (
        f"the layout format changed; if it is meant, write this to {SCHEMA.name}:\n"
        + json.dumps(schema, indent=2, ensure_ascii=False)
    )
