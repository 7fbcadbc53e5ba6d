"""Byte formulas against counting, token by token and step by step."""

import pytest

from hybridcp.layout import Layout
from hybridcp.masks import causal
from hybridcp.planner.cluster import load_cluster
from hybridcp.planner.problem import make_problem
from hybridcp.planner.traffic import (
    all_to_all_dout_bytes,
    all_to_all_dqkv_bytes,
    all_to_all_out_bytes,
    all_to_all_qkv_bytes,
    head_counts,
    ring_backward_bytes,
    ring_forward_bytes,
)
from hybridcp.schedule import Schedule

CASES = [
    # heads, kv_heads, U, R, seq_len, sharding
    (8, 8, 2, 4, 64, "zigzag"),
    (8, 2, 4, 2, 64, "contiguous"),
    (8, 2, 8, 1, 61, "zigzag"),
    (12, 3, 2, 3, 50, "zigzag"),
    (12, 6, 4, 2, 47, "contiguous"),
    (6, 1, 3, 1, 10, "contiguous"),
    (4, 4, 1, 5, 23, "zigzag"),
    (4, 2, 2, 2, 3, "zigzag"),
]


def make(heads, kv_heads, ulysses, ring, seq_len, sharding, batch=2):
    problem = make_problem(
        heads=heads,
        ranks=ulysses * ring,
        kv_heads=kv_heads,
        head_dim=16,
        seq_len=seq_len,
        batch=batch,
        dtype="bf16",
        mask="causal",
        cluster=load_cluster("h100-8"),
    )
    layout = Layout(ulysses_degree=ulysses, ring_degree=ring, sharding=sharding)
    return problem, layout.shard(seq_len)


def held_tokens(sharding, ring_rank, ulysses_rank):
    return {t for a, b in sharding.rank_ranges(ring_rank, ulysses_rank) for t in range(a, b)}


def used_heads(problem, ulysses_degree, ulysses_rank):
    each = problem.heads // ulysses_degree
    queries = set(range(ulysses_rank * each, (ulysses_rank + 1) * each))
    return queries, {h // (problem.heads // problem.kv_heads) for h in queries}


def all_ranks(sharding):
    degrees = (sharding.ring_degree, sharding.ulysses_degree)
    return [(r, u) for r in range(degrees[0]) for u in range(degrees[1])]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_all_to_all_by_counting(case):
    problem, sharding = make(*case)
    element_bytes = problem.head_dim * problem.batch * 2
    degree = sharding.ulysses_degree
    for r, u in all_ranks(sharding):
        qkv = out = dout = dqkv = 0
        mine = held_tokens(sharding, r, u)
        my_queries, my_keys = used_heads(problem, degree, u)
        for other in set(range(degree)) - {u}:
            theirs = held_tokens(sharding, r, other)
            queries, keys = used_heads(problem, degree, other)
            qkv += len(mine) * (len(queries) + 2 * len(keys)) * element_bytes
            out += len(theirs) * len(my_queries) * element_bytes
            dout += len(mine) * len(queries) * element_bytes
            dqkv += len(theirs) * (len(my_queries) + 2 * len(my_keys)) * element_bytes
        assert all_to_all_qkv_bytes(problem, sharding, r, u) == qkv
        assert all_to_all_out_bytes(problem, sharding, r, u) == out
        assert all_to_all_dout_bytes(problem, sharding, r, u) == dout
        assert all_to_all_dqkv_bytes(problem, sharding, r, u) == dqkv


@pytest.mark.parametrize("case", CASES, ids=str)
def test_ring_by_walking_the_schedule(case):
    problem, sharding = make(*case)
    schedule = Schedule(sharding, causal())
    for r, u in all_ranks(sharding):
        _, keys = used_heads(problem, sharding.ulysses_degree, u)
        elements = 2 * len(keys) * problem.head_dim * problem.batch
        forward = sum(
            elements * 2 * sharding.ring_len(step.kv_owner)
            for step in schedule.forward_steps(r)
            if step.sends
        )
        backward = 0
        steps = schedule.backward_steps(r)
        for t, step in enumerate(steps):
            block = elements * sharding.ring_len(step.kv_owner)
            backward += 2 * block if step.sends else 0
            backward += 4 * block if t < len(steps) - 1 else 0
        assert ring_forward_bytes(problem, sharding, r, u) == forward
        assert ring_backward_bytes(problem, sharding, r, u) == backward


@pytest.mark.parametrize(
    ("heads", "kv_heads", "ulysses", "ring"),
    [(32, 32, 8, 32), (32, 8, 8, 4), (32, 8, 4, 8), (32, 8, 32, 2), (32, 1, 16, 4), (16, 4, 1, 8)],
)
def test_closed_forms_of_equal_shards(heads, kv_heads, ulysses, ring):
    """The table in the docs: N/P · H · D · (U - 1)/U and so on, K' = max(K, U)."""
    ranks, tokens, dim = ulysses * ring, 1 << 14, 16
    problem, sharding = make(heads, kv_heads, ulysses, ring, tokens, "zigzag", batch=1)
    shared = max(kv_heads, ulysses)
    rank_tokens = tokens // ranks
    q = rank_tokens * heads * dim * (ulysses - 1) // ulysses
    kv = 2 * rank_tokens * shared * dim * (ulysses - 1) // ulysses
    ring_kv = 2 * (ring - 1) * (tokens // ring) * shared // ulysses * dim
    assert all_to_all_qkv_bytes(problem, sharding, 0, 0) == 2 * (q + kv)
    assert all_to_all_out_bytes(problem, sharding, 0, 0) == 2 * q
    assert ring_forward_bytes(problem, sharding, 0, 0) == 2 * ring_kv
    saved_hop = 2 * (tokens // ring) * shared // ulysses * dim
    expected = 2 * (ring_kv - saved_hop) + 4 * ring_kv
    assert ring_backward_bytes(problem, sharding, 0, 0) == expected


@pytest.mark.parametrize(
    ("heads", "kv_heads", "ulysses", "keys"),
    [
        (8, 8, 2, (4, 4)),
        (8, 2, 4, (1, 1, 1, 1)),
        (12, 3, 2, (2, 2)),
        (12, 6, 4, (2, 2, 2, 2)),
        (40, 8, 5, (2, 3, 2, 3, 2)),
        (6, 1, 3, (1, 1, 1)),
        (7, 7, 1, (7,)),
    ],
)
def test_head_counts(heads, kv_heads, ulysses, keys):
    counts = head_counts(heads, kv_heads, ulysses)
    assert counts.queries == heads // ulysses
    assert counts.keys == keys
