"""`HybridAttention`: exact attention over a sequence that is split Ulysses × Ring (USP).

Sequence shards → (All-to-All) → head shards → ring over the schedule → (All-to-All) → sequence
shards. (USP, arXiv 2405.07719.)
"""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from hybridcp.attention.agreement import Agreement, CheckAgreement
from hybridcp.attention.inputs import check_sequence, check_softmax_scale, check_tensors
from hybridcp.attention.operators import heads_to_sequence, qkv_to_heads, ring_attention
from hybridcp.distributed import ContextParallelGroups, mesh_device, resolve_groups
from hybridcp.errors import HybridCPError, LayoutError
from hybridcp.kernels.protocol import Request
from hybridcp.kernels.registry import Selection, check_kernel_name, select_kernel
from hybridcp.layout import Layout
from hybridcp.sequence import ShardedSequence


class HybridAttention(nn.Module):
    """Attention of a module without parameters; equal to single-device attention.

        layout = hybridcp.Layout(ulysses_degree=2, ring_degree=2)
        mesh = hybridcp.init_mesh(layout)
        attn = HybridAttention(layout, mesh)
        seq = hybridcp.ShardedSequence(layout, mesh, seq_len=N, mask=hybridcp.causal())
        out = attn(q, k, v, seq)            # this rank's tokens of each: (B, L, heads, head_dim)

    One module serves every layer and every sequence of its layout.

    Args:
        layout: degrees, order and sharding.
        mesh: from `hybridcp.init_mesh(layout)`.
        kernel: "auto", or the name of an attention kernel ("flash_attn", "cuda", "cpu",
            "reference").
        check_agreement: whether ranks compare what they are about to do, so that a call that
            differs on one rank is the same error on all: at the "first" call of each kind
            (sizes, dtype, mask, options), "always", or "never". Compiled calls do not ask.

    Raises:
        LayoutError: the mesh does not fit the layout.
        KernelError: no kernel has that name.
        InputError: an unknown `check_agreement`.
    """

    def __init__(
        self,
        layout: Layout,
        mesh: DeviceMesh | ContextParallelGroups,
        *,
        kernel: str = "auto",
        check_agreement: CheckAgreement = "first",
    ) -> None:
        super().__init__()
        check_kernel_name(kernel)
        self.layout = layout
        self.kernel = kernel
        self.groups = resolve_groups(layout, mesh)
        self._agreement = Agreement(layout, self.groups, mesh_device(mesh), check_agreement)
        self._ulysses_degree = layout.ulysses_degree

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        seq: ShardedSequence,
        *,
        softmax_scale: float | None = None,
    ) -> torch.Tensor:
        """Attention of this rank's queries over the whole sequence. A collective.

        Args:
            q: (B, L, H, D), L = `seq.local_len`; any strides.
            k: (B, L, K, D); K divides H, and may be smaller than `ulysses_degree`.
            v: (B, L, K, D).
            seq: the sequence and its mask.
            softmax_scale: factor of q · k, 1 / sqrt(D) by default.

        Returns:
            (B, L, H, D) in q's dtype. A query that sees no key gets 0.

        Raises:
            InputError: shapes, dtypes or devices that do not fit `seq`.
            LayoutError: heads that the layout cannot split, or a sequence of another layout.
            KernelError: no kernel supports this dtype, device and head_dim.
        """
        if not torch.compiler.is_compiling():
            self._admit(q, k, v, seq, softmax_scale)
        heads, kv_heads = q.size(2), k.size(2)
        scale = q.size(-1) ** -0.5 if softmax_scale is None else float(softmax_scale)
        if self._ulysses_degree == 1:
            q_heads, kv = q, torch.stack((k, v))
        else:
            q_heads, kv = qkv_to_heads(q, k, v, seq)
        out: torch.Tensor
        out, _, _ = ring_attention(q_heads, kv, seq, self.kernel, heads, kv_heads, scale)
        return out if self._ulysses_degree == 1 else heads_to_sequence(out, seq)

    def select_kernel(self, q: torch.Tensor) -> Selection:
        """The kernel that serves tensors like `q`, and the reason for it.

        Raises:
            KernelError: none does.
        """
        return select_kernel(self.kernel, Request(q.device.type, q.dtype, q.size(-1)))

    def extra_repr(self) -> str:
        """What `print(module)` shows."""
        layout = self.layout
        return (
            f"ulysses_degree={layout.ulysses_degree}, ring_degree={layout.ring_degree}, "
            f"order={layout.order}, sharding={layout.sharding}, kernel={self.kernel}"
        )

    def _admit(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        seq: ShardedSequence,
        softmax_scale: float | None,
    ) -> None:
        """Raise unless this rank can make the call, and all ranks make the same."""
        try:
            self._check(q, k, v, seq, softmax_scale)
        except HybridCPError as problem:
            self._agreement.refuse(problem)
        gradient = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
        call = (q.shape, k.shape, v.shape, q.dtype, softmax_scale, seq.fingerprint, gradient)
        if self._agreement.covers(call):
            return
        facts = {
            "batch": q.size(0),
            "heads": q.size(2),
            "kv_heads": k.size(2),
            "head_dim": q.size(3),
            "dtype": q.dtype,
            "softmax_scale": softmax_scale,
            "seq_len": seq.seq_len,
            "mask": f"{seq.fingerprint} {seq.mask}",
            "layout": self.layout.model_dump_json(),
            "kernel": self.kernel,
            "need of a gradient": gradient,
        }
        self._agreement.confirm(call, {name: str(fact) for name, fact in facts.items()})

    def _check(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        seq: ShardedSequence,
        softmax_scale: float | None,
    ) -> None:
        check_sequence(seq, self.layout)
        if seq.groups.ring.group is not self.groups.ring.group:
            raise LayoutError(
                "the sequence and the module were made with different meshes; call "
                "hybridcp.init_mesh(layout) once and give both the same mesh"
            )
        check_tensors(q, k, v, seq)
        if softmax_scale is not None:
            check_softmax_scale(softmax_scale)
        self.select_kernel(q)
