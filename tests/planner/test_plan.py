"""Answers of the planner: published rules, users' questions, and what it refuses."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridcp.errors import ClusterError, MaskError, PlanError
from hybridcp.masks import causal, documents
from hybridcp.planner import plan
from hybridcp.planner.search import MODEL_ERROR


def split(result):
    return result.best.layout.ulysses_degree, result.best.layout.ring_degree


def total(result, ulysses):
    times = [c.total_s for c in result.candidates if c.layout.ulysses_degree == ulysses]
    return min(times)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "ranks", "expected"),
    [
        (40, 8, 64, (8, 8)),
        (40, 8, 16, (8, 2)),
        (40, 8, 40, (8, 5)),
        (40, 8, 48, (8, 6)),
        (28, None, 8, (4, 2)),
        (30, None, 4, (2, 2)),
        (7, None, 8, (1, 8)),
        (12, None, 16, (4, 4)),
        (32, None, 257, (1, 257)),
        (64, 8, 3, (1, 3)),
        (32, None, 256, (8, 32)),
        (32, 8, 256, (8, 32)),
        (32, 8, 16, (8, 2)),
        (32, 8, 8, (8, 1)),
        (1, None, 1, (1, 1)),
    ],
)
def test_what_users_ask(heads, kv_heads, ranks, expected):
    assert split(plan(heads, ranks, kv_heads=kv_heads, cluster="h200-8")) == expected


def test_a_million_tokens_on_256_gpus():
    result = plan(heads=32, ranks=256)
    assert split(result) == (8, 32)
    assert result.best.layout.sharding == "zigzag"
    assert result.best.layout.order == "ulysses_inner"
    assert total(result, 1) > 5 * total(result, 8)
    assert [r.ulysses_degree for r in result.rejected] == [64, 128, 256]
    assert {r.reason for r in result.rejected} == {"heads"}


def test_ties_are_within_the_models_error_and_come_first():
    result = plan(heads=32, ranks=256, kv_heads=8)
    fastest = min(c.total_s for c in result.candidates)
    flags = [c.tie for c in result.candidates]
    assert flags == sorted(flags, reverse=True)
    for candidate in result.candidates:
        assert candidate.tie == (candidate.total_s <= fastest * (1 + MODEL_ERROR))


def test_slow_all_to_all_favours_a_ring():
    result = plan(heads=32, ranks=8, kv_heads=8, seq_len="128k", cluster="l20-8")
    assert split(result)[0] <= 2
    assert total(result, 8) > 1.3 * total(result, 2)


def test_short_sequences_favour_ulysses():
    short = plan(heads=32, ranks=8, seq_len="8k")
    assert total(short, 1) > 1.3 * total(short, 8)
    long = plan(heads=32, ranks=8, seq_len="1M", cluster="h200-8")
    assert total(long, 1) < 1.05 * total(long, 8)


def test_two_to_the_31_elements():
    result = plan(heads=32, ranks=2)
    assert split(result) == (2, 1)
    assert any("2^31" in warning for warning in result.best.warnings)
    assert not any("2^31" in w for w in plan(heads=32, ranks=4).best.warnings)


def test_memory_is_a_reason_to_reject():
    result = plan(heads=32, ranks=1)
    assert not result.candidates
    assert result.rejected[0].reason == "memory"
    assert "80 GiB" in result.rejected[0].text
    assert "No layout of 1 rank fits" in str(result)
    with pytest.raises(PlanError, match=r"no layout of 1 ranks? fits.*GiB"):
        _ = result.best


def test_ulysses_beyond_a_node_warns():
    result = plan(heads=32, ranks=256)
    wide = [c for c in result.candidates if c.layout.ulysses_degree == 16]
    assert all(any("crosses network" in w for w in c.warnings) for c in wide)


def test_fewer_tokens_than_chunks_warns():
    result = plan(heads=8, ranks=8, seq_len=5)
    assert any("stay empty" in w for c in result.candidates for w in c.warnings)


def test_a_prime_number_of_ranks_is_explained():
    assert "256 ranks would allow ulysses 32" in " ".join(plan(heads=32, ranks=257).notes)
    assert "7 ranks would allow ulysses 7" in " ".join(plan(7, 8).notes)


def test_causal_prefers_zigzag():
    result = plan(heads=7, ranks=8)
    by_sharding = {c.layout.sharding: c.total_s for c in result.candidates}
    assert by_sharding["contiguous"] > 1.5 * by_sharding["zigzag"]


UNEVEN = "causal & documents:8k,700k,1000,16k,200k,17432,82k"


def test_uneven_documents_prefer_balanced():
    result = plan(heads=8, kv_heads=4, ranks=16, seq_len="1048576", mask=UNEVEN)
    best = {}
    for candidate in result.candidates:
        if candidate.layout.ring_degree == 4:
            name = candidate.layout.sharding
            best[name] = min(best.get(name, candidate), candidate, key=lambda c: c.total_s)
    assert best["balanced"].total_s < 0.8 * best["zigzag"].total_s
    assert best["balanced"].price.busiest_share < 1.05 < 1.2 < best["zigzag"].price.busiest_share
    assert result.best.layout.sharding == "balanced"
    assert ", balanced" in str(result)
    shares = {c["layout"]["sharding"]: c["busiest_share"] for c in result.to_dict()["candidates"]}
    assert shares["balanced"] < shares["zigzag"]


@pytest.mark.parametrize("mask", ["causal", "full", "window:100"])
def test_balanced_is_not_offered_where_it_changes_nothing(mask):
    result = plan(heads=7, ranks=8, seq_len="64k", mask=mask)
    assert "balanced" not in {c.layout.sharding for c in result.candidates}


def test_balanced_is_searched_in_rings_up_to_256():
    result = plan(heads=1, ranks=257, seq_len=4096, mask="prefix:1k")
    assert "balanced" not in {c.layout.sharding for c in result.candidates}
    assert "rings up to 256" in " ".join(result.assumptions)
    assert "rings up to 256" not in " ".join(plan(heads=1, ranks=257).assumptions)


def test_assumptions_name_every_default():
    text = " ".join(plan(heads=32, ranks=8).assumptions)
    for word in ("32 kv_heads", "head_dim 128", "1M tokens", "causal", "bf16", "h100-8"):
        assert word in text


def test_masks_as_text_and_as_objects():
    text = plan(heads=8, ranks=4, seq_len="64k", mask="causal & documents:32k*2")
    same = plan(heads=8, ranks=4, seq_len="64k", mask=causal() & documents([32768] * 2))
    assert text.candidates == same.candidates
    with pytest.raises(MaskError, match="sum to 65536"):
        plan(heads=8, ranks=4, seq_len="1M", mask="documents:32k*2")
    half = plan(heads=8, ranks=4, seq_len="64k")
    assert text.best.total_s < half.best.total_s


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": 0}, "heads must be a whole number ≥ 1"),
        ({"ranks": 0}, "ranks must be a whole number ≥ 1"),
        ({"ranks": -3}, "ranks must be"),
        ({"ranks": 2.0}, "ranks must be"),
        ({"ranks": 10**9}, "ranks must be at most"),
        ({"heads": True}, "heads must be"),
        ({"kv_heads": 3}, "kv_heads must divide heads.*the nearest that does is 2"),
        ({"kv_heads": 64}, "kv_heads must divide heads.*the nearest that does is 32"),
        ({"kv_heads": 0}, "kv_heads must be"),
        ({"head_dim": 0}, "head_dim must be"),
        ({"batch": 0}, "batch must be"),
        ({"seq_len": "foo"}, "seq_len must be"),
        ({"seq_len": 0}, "seq_len must be"),
        ({"dtype": "int8"}, "dtype must be one of bf16, fp16, fp32"),
        ({"dtype": "fp32"}, "states no peak_tflops for fp32"),
        ({"ranks": 16, "cluster": "l20-8"}, "holds 8 ranks"),
    ],
)
def test_impossible_questions(change, message):
    with pytest.raises(PlanError, match=message):
        plan(**({"heads": 32, "ranks": 8} | change))


def test_unknown_cluster():
    with pytest.raises(ClusterError, match="a100-8"):
        plan(32, 8, cluster="nowhere")


@settings(max_examples=60, deadline=None)
@given(
    heads=st.integers(1, 24),
    group=st.integers(1, 4),
    ranks=st.integers(1, 40),
    seq_len=st.integers(1, 5000),
    mask=st.sampled_from(["causal", "full", "window:17", "window:3,5"]),
)
def test_any_question_has_a_consistent_answer(heads, group, ranks, seq_len, mask):
    result = plan(heads * group, ranks, kv_heads=heads, seq_len=seq_len, mask=mask, head_dim=64)
    splits = {c.layout.ulysses_degree for c in result.candidates}
    rejected = {r.ulysses_degree for r in result.rejected}
    assert splits | rejected == {u for u in range(1, ranks + 1) if ranks % u == 0}
    assert not splits & rejected
    for candidate in result.candidates:
        assert candidate.layout.cp_degree == ranks
        assert heads * group % candidate.layout.ulysses_degree == 0
        for part in (candidate.price.forward, candidate.price.backward):
            assert part.compute_s >= 0
            assert part.ring_exposed_s >= 0
    json.dumps(result.to_dict(), allow_nan=False)
    assert max(map(len, str(result).splitlines())) <= 100
