import pytest
import torch

from hybridcp.errors import HybridCPError, KernelError
from hybridcp.kernels import KERNEL_NAMES, Request, explain_kernels, select_kernel
from hybridcp.kernels.registry import check_kernel_name

ON_CPU = Request("cpu", torch.float32, 64, 64)
ON_META = Request("meta", torch.float32, 64, 64)


def test_auto_on_the_cpu_says_why_it_was_picked_and_why_not_the_others() -> None:
    selection = select_kernel("auto", ON_CPU)
    assert selection.kernel.name == "cpu"
    assert selection.reason == (
        "cpu is the first kernel that supports device 'cpu', float32, head_dim 64; before it "
        "flash_attn was refused (it needs a CUDA device, got device 'cpu') and "
        "cuda was refused (it needs a CUDA device, got device 'cpu')"
    )


def test_auto_falls_back_to_the_reference() -> None:
    selection = select_kernel("auto", ON_META)
    assert selection.kernel.name == "reference"
    assert "cpu was refused" in selection.reason


@pytest.mark.parametrize("name", ["cpu", "reference"])
def test_a_named_kernel(name: str) -> None:
    selection = select_kernel(name, ON_CPU)
    assert selection.kernel.name == name
    assert "asked for" in selection.reason


@pytest.mark.parametrize("name", ["flash_attn", "cuda"])
def test_a_named_kernel_that_refuses_names_the_reason_and_the_nearest(name: str) -> None:
    with pytest.raises(KernelError, match=rf"'{name}'.*float32.*CUDA device.*kernel='cpu'"):
        select_kernel(name, ON_CPU)


def test_an_unknown_name_lists_the_valid_ones() -> None:
    with pytest.raises(HybridCPError, match=r"'flash3'.*'auto', 'flash_attn', 'cuda', 'cpu'"):
        select_kernel("flash3", ON_CPU)
    with pytest.raises(KernelError, match="'flash3'"):
        check_kernel_name("flash3")


@pytest.mark.parametrize("name", ["auto", "cpu", "reference"])
def test_whole_numbers_are_served_by_no_kernel(name: str) -> None:
    with pytest.raises(KernelError, match="int64"):
        select_kernel(name, Request("cpu", torch.int64, 64, 64))


def test_explain_lists_every_kernel_in_order() -> None:
    explained = explain_kernels(ON_CPU)
    assert tuple(name for name, _ in explained) == KERNEL_NAMES
    assert [name for name, refusal in explained if refusal is None] == ["cpu", "reference"]
