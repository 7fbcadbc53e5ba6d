"""`HybridAttention`: exact attention over a sequence that is split Ulysses × Ring (USP).

Sequence shards → (All-to-All) → head shards → ring over the schedule → (All-to-All) → sequence
shards. (USP, arXiv 2405.07719.)
"""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from hybridcp.attention.agreement import Agreement, CheckAgreement
from hybridcp.attention.inputs import (
    ScoreOptions,
    check_options,
    check_sequence,
    check_tensors,
)
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
        softcap: float = 0.0,
        sinks: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        return_lse: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Attention of this rank's queries over the whole sequence. A collective.

        Args:
            q: (B, L, H, D), L = `seq.local_len`; any strides.
            k: (B, L, K, D); K divides H, and may be smaller than `ulysses_degree`.
            v: (B, L, K, Dv); Dv may differ from D.
            seq: the sequence and its mask.
            softmax_scale: factor of q · k, 1 / sqrt(D) by default.
            softcap: scores become softcap · tanh(score / softcap); 0 for none.
            sinks: (H,) a logit for each query head that takes part in the softmax and gives no
                value. Its gradient is this rank's share: sum it over the ranks like any other.
            dropout_p: of attention weights. Refused above 0 in training, ignored in eval.
            return_lse: return the log-sum-exp too, (B, H, L) float32, without a gradient.

        Returns:
            (B, L, H, Dv) in q's dtype. A query that sees no key gets 0 (and lse -inf).

        Raises:
            InputError: shapes, dtypes or devices that do not fit `seq`, or dropout in training.
            LayoutError: heads that the layout cannot split, or a sequence of another layout.
            KernelError: no kernel supports this dtype, device and head dims.
        """
        options = ScoreOptions(softmax_scale, softcap, sinks, dropout_p if self.training else 0.0)
        if not torch.compiler.is_compiling():
            self._admit(q, k, v, seq, options)
        heads, kv_heads, value_dim = q.size(2), k.size(2), v.size(3)
        scale = q.size(-1) ** -0.5 if softmax_scale is None else float(softmax_scale)
        if self._ulysses_degree == 1:
            q_heads, kv = q, torch.cat((k.reshape(-1), v.reshape(-1)))
        else:
            q_heads, kv = qkv_to_heads(q, k, v, seq)
        out: torch.Tensor
        lse: torch.Tensor
        out, lse, _ = ring_attention(
            q_heads, kv, sinks, seq, self.kernel, heads, kv_heads, value_dim, scale, float(softcap)
        )
        if self._ulysses_degree > 1:
            out = heads_to_sequence(out, seq, heads)
        if not return_lse:
            return out
        if self._ulysses_degree > 1:
            lse = heads_to_sequence(lse.transpose(1, 2).unsqueeze(-1), seq, heads)
            lse = lse.squeeze(-1).transpose(1, 2)
        return out, lse

    def select_kernel(
        self, q: torch.Tensor, *, value_dim: int | None = None, softcap: float = 0.0
    ) -> Selection:
        """The kernel that serves tensors like `q`, and the reason for it.

        Args:
            q: any tensor with the device, dtype and last dim of the queries.
            value_dim: Dv; D by default.
            softcap: as in `forward`.

        Raises:
            KernelError: none does.
        """
        dim = q.size(-1)
        request = Request(q.device.type, q.dtype, dim, value_dim or dim, softcap > 0)
        return select_kernel(self.kernel, request)

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
        options: ScoreOptions,
    ) -> None:
        """Raise unless this rank can make the call, and all ranks make the same."""
        try:
            self._check(q, k, v, seq, options)
        except HybridCPError as problem:
            self._agreement.refuse(problem)
        leaves = [x for x in (q, k, v, options.sinks) if x is not None]
        gradient = torch.is_grad_enabled() and any(x.requires_grad for x in leaves)
        said = options.in_words()
        call = (q.shape, k.shape, v.shape, q.dtype, said, seq.fingerprint, gradient)
        if self._agreement.covers(call):
            return
        facts = {
            "batch": q.size(0),
            "heads": q.size(2),
            "kv_heads": k.size(2),
            "head_dim": q.size(3),
            "dtype": q.dtype,
            "value_head_dim": v.size(3),
            "scores": said,
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
        options: ScoreOptions,
    ) -> None:
        check_sequence(seq, self.layout)
        if seq.groups.ring.process_groups != self.groups.ring.process_groups:
            raise LayoutError(
                "the sequence and the module were made with different meshes; call "
                "hybridcp.init_mesh(layout) once and give both the same mesh"
            )
        check_tensors(q, k, v, seq)
        check_options(options, q)
        self.select_kernel(q, value_dim=v.size(3), softcap=options.softcap)
