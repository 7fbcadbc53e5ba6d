import sys
from types import SimpleNamespace

import pytest
import torch

from hybridcp.errors import KernelError
from hybridcp.kernels.cuda import cuda_kernel
from hybridcp.kernels.flash_attn import FlashAttnPackage, flash_attn_kernel, load_package
from hybridcp.kernels.protocol import Request, Scores
from hybridcp.masks import Band, causal, documents
from tests.kernels import flash_attn_stand_in
from tests.kernels.brute_force import make_case
from tests.kernels.contract import qkv

SERVED = Request("cuda", torch.bfloat16, 128, 128)


@pytest.fixture
def a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))


def install(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    package = SimpleNamespace(__version__=version)
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    monkeypatch.setitem(sys.modules, "flash_attn.flash_attn_interface", flash_attn_stand_in)


def test_a_missing_package_is_a_refusal_with_the_command(
    monkeypatch: pytest.MonkeyPatch, a_gpu: None
) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    refusal = flash_attn_kernel().refusal(SERVED)
    assert refusal is not None
    assert "not installed" in refusal
    assert "pip install flash-attn" in refusal


def test_a_package_that_does_not_import_is_a_refusal_with_the_reason(a_gpu: None) -> None:
    def load() -> FlashAttnPackage:
        raise KernelError("flash-attn does not import: undefined symbol")

    assert "undefined symbol" in str(flash_attn_kernel(load).refusal(SERVED))


@pytest.mark.parametrize("version", ["2.8.0", "2.8.3", "2.8.3.post2", "2.10.1"])
def test_supported_versions(monkeypatch: pytest.MonkeyPatch, a_gpu: None, version: str) -> None:
    install(monkeypatch, version)
    assert flash_attn_kernel().refusal(SERVED) is None
    assert load_package().version == version


@pytest.mark.parametrize("version", ["1.0.9", "2.7.4", "3.0.0", "unknown"])
def test_other_versions_are_refused(
    monkeypatch: pytest.MonkeyPatch, a_gpu: None, version: str
) -> None:
    install(monkeypatch, version)
    assert version in str(flash_attn_kernel().refusal(SERVED))


@pytest.mark.parametrize("kernel", [flash_attn_kernel(), cuda_kernel()], ids=["flash_attn", "cuda"])
@pytest.mark.parametrize(
    ("request_", "word"),
    [
        (Request("cpu", torch.bfloat16, 64, 64), "CUDA"),
        (Request("cuda", torch.float32, 64, 64), "float32"),
        (Request("cuda", torch.bfloat16, 264, 264), "264"),
    ],
    ids=["device", "dtype", "head_dim"],
)
def test_refusals_name_the_value(kernel, request_: Request, word: str) -> None:
    assert word in str(kernel.refusal(request_))


def test_an_old_gpu_is_refused(monkeypatch: pytest.MonkeyPatch, a_gpu: None) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    assert "7.5" in str(cuda_kernel().refusal(SERVED))


@pytest.mark.parametrize(
    "change",
    [lambda lse: lse[..., None], lambda lse: lse.double(), lambda lse: lse[..., :-1]],
    ids=["rank", "dtype", "length"],
)
@pytest.mark.parametrize("lengths", [[16], [9, 7]], ids=["dense", "varlen"])
def test_an_unknown_log_sum_exp_names_the_version(change, lengths: list[int]) -> None:
    def changed(function):
        def call(*args, **kwargs):
            out, lse, *rest = function(*args, **kwargs)
            return out, change(lse), *rest

        return call

    interface = SimpleNamespace(
        _flash_attn_forward=changed(flash_attn_stand_in._flash_attn_forward),
        _flash_attn_varlen_forward=changed(flash_attn_stand_in._flash_attn_varlen_forward),
    )
    kernel = flash_attn_kernel(lambda: FlashAttnPackage("2.8.3", interface))
    bands = (documents(lengths) & causal()).bands_for(16, 16)
    case = make_case(bands, 16, 16, dtype=torch.bfloat16)
    with pytest.raises(KernelError, match=r"flash-attn 2\.8\.3"):
        list(kernel.forward(*qkv(case), case.bands, case.scores))


def test_more_rows_than_int32_counts_are_refused() -> None:
    rows = 1 << 31
    q = torch.empty(1, rows, 1, 8, dtype=torch.bfloat16, device="meta")
    k = torch.empty(1, 4, 1, 8, dtype=torch.bfloat16, device="meta")
    with pytest.raises(KernelError, match="int32"):
        list(cuda_kernel().forward(q, k, k, [Band(0, rows, 0, 4)], Scores(1.0)))
