"""The decoder: weights, positions and checkpointing."""

import pytest
import torch
from decoder import Decoder, DecoderConfig, rope
from torch.utils._python_dispatch import TorchDispatchMode
from train_1m import one_process

from hybridcp import HybridAttention, Layout, ShardedSequence
from hybridcp.errors import InputError

LAYOUT = Layout(ulysses_degree=1, ring_degree=1)
SIZES = DecoderConfig(vocab_size=32, layers=2, dim=16, heads=4, kv_heads=2)


def decoder(seed=0, **options):
    return Decoder(SIZES, HybridAttention(LAYOUT, one_process()), seed=seed, **options)


def inputs():
    ids = torch.randint(32, (1, 20), generator=torch.Generator().manual_seed(0))
    seq = ShardedSequence(LAYOUT, one_process(), seq_len=20)
    return ids, seq.position_ids[None], seq


def test_weights_depend_on_the_seed_alone():
    torch.manual_seed(5)
    first = decoder().state_dict()
    torch.manual_seed(6)
    for name, weight in decoder().state_dict().items():
        assert torch.equal(weight, first[name])
    assert not torch.equal(decoder(seed=1).output_weight, first["embedding.weight"])


def test_only_position_differences_matter():
    ids, positions, seq = inputs()
    model = decoder()
    hidden = model(ids, positions, seq)
    torch.testing.assert_close(model(ids, positions + 7, seq), hidden)
    assert not torch.allclose(model(ids, 2 * positions, seq), hidden, atol=1e-3)


def test_rotation_is_exact_at_a_million():
    positions = torch.tensor([[2**20 - 1]])
    cos, sin = rope(positions, SIZES, torch.float32)
    angle = (2**20 - 1) * SIZES.rope_base ** (-0.5)
    expected = torch.tensor(angle, dtype=torch.float64)
    assert cos[0, 0, 0, 1].item() == pytest.approx(expected.cos().item(), abs=1e-7)
    assert sin[0, 0, 0, 1].item() == pytest.approx(expected.sin().item(), abs=1e-7)


class Calls(TorchDispatchMode):
    """Counts calls of the forward attention operator."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.hybridcp.ring_attention.default
        return func(*args, **(kwargs or {}))


def test_checkpointing_gives_the_same_gradients_and_does_not_repeat_attention():
    gradients = []
    for checkpoint_activations in (False, True):
        model = decoder(checkpoint_activations=checkpoint_activations)
        with Calls() as calls:
            model(*inputs()).square().sum().backward()
        assert calls.count == SIZES.layers
        gradients.append([weight.grad for weight in model.parameters()])
    for plain, checkpointed in zip(*gradients, strict=True):
        assert torch.equal(plain, checkpointed)


def test_bf16_activations_keep_float32_weights():
    model = decoder(dtype=torch.bfloat16)
    hidden = model(*inputs())
    hidden.sum().backward()
    assert hidden.dtype == torch.bfloat16
    assert {weight.grad.dtype for weight in model.parameters()} == {torch.float32}


@pytest.mark.parametrize(
    "sizes", [{"heads": 3, "kv_heads": 2}, {"dim": 20, "heads": 4}, {"layers": 0}]
)
def test_refuses(sizes):
    with pytest.raises(InputError):
        DecoderConfig(**sizes)
