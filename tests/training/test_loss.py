"""Chunked cross-entropy on one process: value, gradients, memory, and mistakes."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from hybridcp.communicator import Communicator
from hybridcp.distributed import ContextParallelGroups
from hybridcp.errors import InputError
from hybridcp.training import count_targets, linear_cross_entropy, loss_share
from hybridcp.training.loss import chunked_loss

ALONE = ContextParallelGroups(ring=Communicator(None), ulysses=Communicator(None))


def example(tokens=37, width=16, vocabulary=29, dtype=torch.float32, ignored=(0, 5, 36)):
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(1, tokens, width, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(vocabulary, width, generator=generator).to(dtype).requires_grad_()
    labels = torch.randint(vocabulary, (1, tokens), generator=generator)
    labels[:, [i for i in ignored if i < tokens]] = -100
    return hidden, weight, labels


def full_loss(hidden, weight, labels):
    logits = F.linear(hidden, weight).flatten(0, -2)
    return F.cross_entropy(logits, labels.flatten(), reduction="sum")


@pytest.mark.parametrize("chunk_tokens", [1, 7, 37, 1024])
def test_equals_the_full_loss(chunk_tokens):
    hidden, weight, labels = example(dtype=torch.float64)
    loss = linear_cross_entropy(hidden, weight, labels, chunk_tokens=chunk_tokens)
    expected = full_loss(hidden, weight, labels)
    torch.testing.assert_close(loss, expected)
    # A factor in front shows that the incoming gradient is used.
    gradients = torch.autograd.grad(3 * loss, (hidden, weight))
    torch.testing.assert_close(gradients, torch.autograd.grad(3 * expected, (hidden, weight)))


def test_gradcheck():
    hidden, weight, labels = example(5, 3, 4, torch.float64, ignored=(2,))
    assert torch.autograd.gradcheck(
        lambda h, w: linear_cross_entropy(h, w, labels, chunk_tokens=2), (hidden, weight)
    )


def test_operator_is_sound_for_torch_compile():
    hidden, weight, labels = example(5, 3, 4)
    torch.library.opcheck(
        torch.ops.hybridcp.linear_cross_entropy.default,
        (hidden[0], weight, labels[0], 2, True, True),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )


def test_bf16_loses_no_more_than_its_input_did():
    hidden, weight, labels = example(tokens=512, dtype=torch.bfloat16)
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    expected = full_loss(*exact, labels)
    loss = linear_cross_entropy(hidden, weight, labels, chunk_tokens=100)
    assert loss.dtype == torch.float32
    # Logits in bf16 would be off by about 1e-3.
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=0)
    wanted = torch.autograd.grad(expected, exact)
    for got, want in zip(torch.autograd.grad(loss, (hidden, weight)), wanted, strict=True):
        assert got.dtype == torch.bfloat16
        assert (got.double() - want).norm() / want.norm() < 4e-3


def test_weight_gradient_beyond_float16():
    hidden = torch.full((4096, 8), 30.0, dtype=torch.float16)
    weight = torch.zeros(4, 8, dtype=torch.float16, requires_grad=True)
    loss = linear_cross_entropy(hidden, weight, torch.zeros(4096, dtype=torch.int64))
    (loss / 4096).backward()
    torch.testing.assert_close(weight.grad[:, 0].float(), torch.tensor([-22.5, 7.5, 7.5, 7.5]))


def test_autocast_does_not_lower_the_precision():
    hidden, weight, labels = example()
    expected = linear_cross_entropy(hidden, weight, labels)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(linear_cross_entropy(hidden, weight, labels), expected)


@pytest.mark.parametrize("tokens", [0, 6])
def test_no_target_gives_zero_loss_and_zero_gradients(tokens):
    hidden, weight, labels = example(tokens, ignored=range(tokens))
    count = count_targets(labels, ALONE)
    share = loss_share(linear_cross_entropy(hidden, weight, labels), count)
    share.backward()
    assert count == 0
    assert share == 0
    assert torch.equal(hidden.grad, torch.zeros_like(hidden))
    assert torch.equal(weight.grad, torch.zeros_like(weight))


def test_gradients_are_not_computed_when_nobody_wants_them():
    hidden, weight, labels = example()
    _, dhidden, dweight = chunked_loss(hidden[0], weight, labels[0], 8, False, False)
    assert dhidden.numel() == dweight.numel() == 0
    with torch.no_grad():
        loss = linear_cross_entropy(hidden, weight, labels)
    assert not loss.requires_grad
    frozen = linear_cross_entropy(hidden.detach(), weight, labels)
    (dweight,) = torch.autograd.grad(frozen, weight)
    assert dweight.shape == weight.shape


class Largest(TorchDispatchMode):
    """Records the number of elements of the largest tensor any operator returns."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in torch.utils._pytree.tree_leaves(result):
            if isinstance(x, torch.Tensor):
                self.elements = max(self.elements, x.numel())
        return result


def largest_tensor(tokens, width, vocabulary):
    hidden, weight, labels = example(tokens, width, vocabulary)
    with torch.no_grad(), Largest() as largest:
        chunked_loss(hidden[0], weight, labels[0], 64, True, True)
    return largest.elements


def test_memory_does_not_grow_with_tokens_times_vocabulary():
    width, vocabulary = 4, 2000
    assert largest_tensor(512, width, vocabulary) == 64 * vocabulary
    assert largest_tensor(8192, width, vocabulary) == 64 * vocabulary


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda h, w, t: (h, w[:, :-1], t), "same C"),
        (lambda h, w, t: (h, w[0], t), "same C"),
        (lambda h, w, t: (h, w, t[:, :-1]), "one entry for each row"),
        (lambda h, w, t: (h, w, t.int()), "int64"),
        (lambda h, w, t: (h.long(), w, t), "floating point"),
    ],
    ids=["width", "weight-1d", "labels-short", "labels-int32", "hidden-int64"],
)
def test_refuses(change, message):
    with pytest.raises(InputError, match=message):
        linear_cross_entropy(*change(*example()))


def test_refuses_an_empty_chunk():
    with pytest.raises(InputError, match="chunk_tokens"):
        linear_cross_entropy(*example(), chunk_tokens=0)


@pytest.mark.parametrize("label", [29, -1])
def test_a_label_outside_the_vocabulary_is_not_silent(label):
    hidden, weight, labels = example()
    labels[0, 3] = label
    with pytest.raises(RuntimeError, match="out of bounds"):
        linear_cross_entropy(hidden, weight, labels)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_bf16_on_gpu_equals_cpu():
    hidden, weight, labels = example(tokens=512, dtype=torch.bfloat16)
    loss = linear_cross_entropy(hidden.cuda(), weight.cuda(), labels.cuda(), chunk_tokens=100)
    expected = linear_cross_entropy(hidden, weight, labels, chunk_tokens=100)
    torch.testing.assert_close(loss.cpu(), expected, rtol=1e-5, atol=0)
    wanted = torch.autograd.grad(expected, (hidden, weight))
    got = torch.autograd.grad(loss, (hidden, weight))
    torch.testing.assert_close(got, wanted, rtol=2e-2, atol=1e-2)
