"""Wrong shapes, dtypes, heads, meshes and sequences: refused on every rank, before any is sent."""

import pytest
import torch
import torch.distributed as dist

from hybridcp import HybridAttention, HybridCPError, Layout, ShardedSequence, causal, init_mesh
from hybridcp.communicator import Communicator
from hybridcp.distributed import ContextParallelGroups
from hybridcp.errors import InputError, KernelError, LayoutError, MaskError
from hybridcp.masks import documents
from hybridcp.testing import run_threads

LAYOUT = Layout(ulysses_degree=2, ring_degree=2)


class Silent(Communicator):
    """A communicator that lets ranks agree, and fails the test if any tensor is sent."""

    def __init__(self, inner):
        super().__init__(inner.group)

    def all_to_all(self, *_):
        raise AssertionError("a tensor was sent")

    def exchange(self, **_):
        raise AssertionError("a tensor was sent")


def tensors(q=(1, 4, 4, 8), k=(1, 4, 2, 8), v=None, dtype=torch.float32, k_dtype=None):
    v = k if v is None else v
    return (
        torch.zeros(q, dtype=dtype),
        torch.zeros(k, dtype=k_dtype or dtype),
        torch.zeros(v, dtype=k_dtype or dtype),
    )


REFUSED_TENSORS = {
    "three dims": (tensors(q=(4, 4, 8)), InputError, "(batch, seq, heads, head_dim)"),
    "wrong length": (tensors(q=(1, 5, 4, 8)), InputError, "has 5 tokens where this rank has 4"),
    "keys of another length": (tensors(k=(1, 3, 2, 8)), InputError, "k has 3 tokens"),
    "batches differ": (tensors(k=(2, 4, 2, 8)), InputError, "agree in batch"),
    "head dims differ": (tensors(k=(1, 4, 2, 16)), InputError, "head_dim"),
    "k and v differ": (tensors(v=(1, 4, 4, 8)), InputError, "k and v in heads"),
    "no batch": (tensors(q=(0, 4, 4, 8), k=(0, 4, 2, 8)), InputError, "at least 1"),
    "no head dim": (tensors(q=(1, 4, 4, 0), k=(1, 4, 2, 0)), InputError, "at least 1"),
    "dtypes differ": (tensors(k_dtype=torch.bfloat16), InputError, "one floating-point dtype"),
    "integers": (tensors(dtype=torch.int64), InputError, "floating-point"),
    "devices differ": (
        (tensors()[0], *(x.to("meta") for x in tensors()[1:])),
        InputError,
        "one device",
    ),
    "kv heads do not divide": (tensors(k=(1, 4, 3, 8)), LayoutError, "multiple of kv_heads"),
    "more kv heads than heads": (tensors(k=(1, 4, 8, 8)), LayoutError, "multiple of kv_heads"),
    "fewer heads than ulysses": (tensors(q=(1, 4, 1, 8), k=(1, 4, 1, 8)), LayoutError, "can be 1"),
    "no value dim": (tensors(v=(1, 4, 2, 0)), InputError, "at least 1"),
    "no tensor": ((None, *tensors()[1:]), InputError, "q must be a tensor, got NoneType"),
}


def _attempt(groups, q, k, v, options):
    silent = ContextParallelGroups(ring=Silent(groups.ring), ulysses=Silent(groups.ulysses))
    seq = ShardedSequence(LAYOUT, silent, seq_len=16)
    try:
        HybridAttention(LAYOUT, silent)(q, k, v, seq, **options)
    except HybridCPError as problem:
        return type(problem), str(problem)
    return None


@pytest.mark.parametrize("name", REFUSED_TENSORS)
def test_tensors_that_do_not_fit(name):
    (q, k, v), error, words = REFUSED_TENSORS[name]
    for outcome in run_threads(_attempt, LAYOUT, q, k, v, {}):
        assert outcome is not None and outcome[0] is error
        assert words in outcome[1] and "\n" not in outcome[1]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"softmax_scale": float("nan")}, "softmax_scale must be a finite number"),
        ({"softmax_scale": "0.1"}, "softmax_scale must be a finite number"),
        ({"softcap": -1.0}, "softcap must be a finite number ≥ 0"),
        ({"softcap": float("inf")}, "softcap must be a finite number ≥ 0"),
        ({"dropout_p": 0.1}, "dropout_p = 0.1: attention dropout in training is not supported"),
        ({"sinks": torch.zeros(2)}, "sinks must be one logit for each of the 4 query heads"),
        ({"sinks": torch.zeros(4, dtype=torch.int64)}, "floating point"),
        ({"sinks": 0.5}, "sinks must be a local tensor, got float"),
    ],
)
def test_options_that_cannot_be_honoured(options, words):
    for outcome in run_threads(_attempt, LAYOUT, *tensors(), options):
        assert outcome is not None and outcome[0] is InputError and words in outcome[1]


def _eval_with_dropout(groups):
    seq = ShardedSequence(LAYOUT, groups, seq_len=16)
    attention = HybridAttention(LAYOUT, groups).eval()
    q = torch.randn(1, seq.local_len, 4, 8)
    return torch.equal(attention(q, q, q, seq, dropout_p=0.1), attention(q, q, q, seq))


def test_dropout_is_ignored_in_eval():
    assert all(run_threads(_eval_with_dropout, LAYOUT))


def _with_sequence_of(groups, kind):
    silent = ContextParallelGroups(ring=Silent(groups.ring), ulysses=Silent(groups.ulysses))
    attention = HybridAttention(LAYOUT, silent)
    seq = {
        "nothing": None,
        "another layout": ShardedSequence(
            LAYOUT.model_copy(update={"sharding": "contiguous"}), silent, seq_len=16
        ),
        "another mesh": ShardedSequence(
            LAYOUT, ContextParallelGroups(Silent(groups.ulysses), Silent(groups.ring)), seq_len=16
        ),
    }[kind]
    try:
        attention(*tensors(), seq)
    except HybridCPError as problem:
        return str(problem)
    return None


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("nothing", "must be a hybridcp.ShardedSequence"),
        ("another layout", "give both the same layout"),
        ("another mesh", "different meshes"),
    ],
)
def test_sequences_that_do_not_belong(kind, words):
    for outcome in run_threads(_with_sequence_of, LAYOUT, kind):
        assert outcome is not None and words in outcome


def test_a_kernel_of_unknown_name():
    with pytest.raises(KernelError, match="'flsh'.*flash_attn"):
        HybridAttention(*_alone(), kernel="flsh")


def test_a_kernel_that_cannot():
    layout, groups = _alone()
    seq = ShardedSequence(layout, groups, seq_len=4)
    with pytest.raises(KernelError, match="flash_attn"):
        HybridAttention(layout, groups, kernel="flash_attn")(*tensors(), seq)


def test_a_compiled_call_refuses_rows_of_another_length_too():
    """Compiled code skips the Python checks; the operators repeat the one that could hang."""
    layout, groups = _alone()
    seq = ShardedSequence(layout, groups, seq_len=4)
    compiled = torch.compile(HybridAttention(layout, groups), backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="has 3 tokens where this rank has 4"):
        compiled(*tensors(q=(1, 3, 4, 8), k=(1, 3, 2, 8)), seq)


@pytest.mark.parametrize("seq_len", [0, -1, 2.5, True])
def test_lengths_that_are_no_lengths(seq_len):
    with pytest.raises(LayoutError, match="seq_len must be a whole number ≥ 1"):
        ShardedSequence(*_alone(), seq_len=seq_len)


def test_documents_that_do_not_fill_the_sequence():
    with pytest.raises(MaskError, match="sum to 9, but the sequence has 8"):
        ShardedSequence(*_alone(), seq_len=8, mask=causal() & documents([4, 5]))


def _alone():
    groups = ContextParallelGroups(Communicator(None), Communicator(None))
    return Layout(ulysses_degree=1, ring_degree=1), groups


def _mesh_problem(degrees, kind):
    layout = Layout(ulysses_degree=degrees[0], ring_degree=degrees[1])
    try:
        if kind == "world":
            init_mesh(layout, device_type="cpu")
        elif kind == "no cp axis":
            init_mesh(layout, dist.init_device_mesh("cpu", (4,), mesh_dim_names=("dp",)))
        elif kind == "cp of another size":
            names = ("dp", "cp")
            init_mesh(layout, dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=names))
        elif kind == "unsplit":
            mesh = dist.init_device_mesh("cpu", (4,), mesh_dim_names=("cp",))
            HybridAttention(layout, mesh)
        elif kind == "other degrees":
            names = ("ring", "ulysses")
            mesh = dist.init_device_mesh("cpu", (1, 4), mesh_dim_names=names)
            ShardedSequence(layout, mesh, seq_len=8)
        else:
            ShardedSequence(layout, None, seq_len=8)
    except LayoutError as problem:
        return str(problem)
    return None


@pytest.mark.parametrize(
    ("degrees", "kind", "words"),
    [
        ((4, 2), "world", "4 × 2 = 8, but the group has 4 ranks; ulysses_degree=4, ring_degree=1"),
        ((3, 1), "world", "ulysses_degree=2, ring_degree=2 would fit"),
        ((2, 2), "no cp axis", 'none is named "cp"'),
        ((2, 2), "cp of another size", "the group has 2 ranks"),
        ((2, 2), "unsplit", "hybridcp.init_mesh(layout, mesh)"),
        ((2, 2), "other degrees", "ring_degree 2, but the mesh has 1 ranks"),
        ((2, 2), "none", "must be a DeviceMesh"),
    ],
)
def test_meshes_that_do_not_fit(run_distributed, degrees, kind, words):
    for outcome in run_distributed(_mesh_problem, 4, degrees, kind):
        assert outcome is not None and words in outcome
