"""`ShardedSequence`: one sequence over the ranks of a layout, and this rank's part of it.

Ties a layout, a mesh, a length and a mask together: which tokens this rank holds, their global
indices and positions, its steps of the schedule, and how to cut and restore tensors and batches.
"""

import hashlib
from array import array
from functools import cached_property
from itertools import chain

import torch
from torch._opaque_base import OpaqueBase
from torch.distributed.device_mesh import DeviceMesh

from hybridcp.distributed import ContextParallelGroups, mesh_device, resolve_groups
from hybridcp.errors import InputError
from hybridcp.layout import Layout
from hybridcp.masks import AttentionMask, causal
from hybridcp.schedule import Schedule
from hybridcp.steps import Step, size_of

IGNORE_INDEX = -100
"""Label of a position without a target, as in torch's cross_entropy and Hugging Face."""


class ShardedSequence(OpaqueBase):
    """This rank's shard of a sequence of `seq_len` tokens under a mask.

        seq = ShardedSequence(layout, mesh, seq_len=1_048_576, mask=causal())
        local = seq.shard(tokens, dim=1)          # (B, N) → (B, seq.local_len)
        seq.unshard(local, dim=1)                 # back, on every rank

    Args:
        layout: degrees and sharding.
        mesh: from `init_mesh(layout)`.
        seq_len: N, number of global tokens.
        mask: allowed pairs; causal by default.

    Raises:
        LayoutError: mesh and layout disagree, or `seq_len` is below 1.
        MaskError: the mask does not fit `seq_len`.
    """

    def __init__(
        self,
        layout: Layout,
        mesh: DeviceMesh | ContextParallelGroups,
        *,
        seq_len: int,
        mask: AttentionMask | None = None,
    ) -> None:
        mask = mask if mask is not None else causal()
        sharding = layout.shard(seq_len, mask)
        self._set_up(layout, mesh, Schedule.of_layout(layout, sharding, mask))

    def _set_up(
        self, layout: Layout, mesh: DeviceMesh | ContextParallelGroups, schedule: Schedule
    ) -> None:
        self.layout = layout
        self.mesh = mesh
        self.groups = resolve_groups(layout, mesh)
        self.device = mesh_device(mesh)
        self.schedule = schedule

    def __repr__(self) -> str:
        return (
            f"ShardedSequence(seq_len={self.seq_len}, mask={self.mask}, {self.layout!r}, "
            f"ring_rank={self.groups.ring.rank}, ulysses_rank={self.groups.ulysses.rank}, "
            f"local_len={self.local_len})"
        )

    @property
    def seq_len(self) -> int:
        """N, number of global tokens."""
        return self.schedule.sharding.seq_len

    @property
    def mask(self) -> AttentionMask:
        """The allowed (query, key) pairs."""
        return self.schedule.mask

    @cached_property
    def fingerprint(self) -> str:
        """Short digest of shards, layout and mask: equal on all ranks that share a sequence."""
        edges = chain.from_iterable(self.schedule.bands)
        digest = hashlib.sha256(array("q", edges).tobytes())
        digest.update(repr((self.schedule.sharding, self.layout)).encode())
        return digest.hexdigest()[:12]

    @cached_property
    def rank_lens(self) -> tuple[int, ...]:
        """Tokens of each rank of this rank's Ulysses group."""
        return self.schedule.sharding.rank_lens(self.groups.ring.rank)

    @cached_property
    def ring_lens(self) -> tuple[int, ...]:
        """Tokens of each ring position."""
        sharding = self.schedule.sharding
        return tuple(sharding.ring_len(r) for r in range(sharding.ring_degree))

    @property
    def kept_len(self) -> int:
        """Tokens of the block that the backward starts from; 0 if that is this rank's own."""
        last = self.forward_steps[-1]
        own = last.kv_owner in (None, self.groups.ring.rank)
        return 0 if own else size_of(last.kv_rows)

    @property
    def local_len(self) -> int:
        """Tokens that this rank holds."""
        return self.rank_lens[self.groups.ulysses.rank]

    @property
    def ring_len(self) -> int:
        """Tokens that this rank's Ulysses group holds together."""
        return self.ring_lens[self.groups.ring.rank]

    @cached_property
    def forward_steps(self) -> tuple[Step, ...]:
        """This ring position's steps of the forward pass."""
        return self.schedule.forward_steps(self.groups.ring.rank)

    @cached_property
    def backward_steps(self) -> tuple[Step, ...]:
        """This ring position's steps of the backward pass."""
        return self.schedule.backward_steps(self.groups.ring.rank)

    @cached_property
    def indices(self) -> torch.Tensor:
        """(local_len,) int64: the global index of each local token, ascending."""
        ranges = self._ranges(self.groups.ring.rank, self.groups.ulysses.rank)
        return torch.cat([torch.arange(a, b) for a, b in ranges]).to(self.device)

    @cached_property
    def position_ids(self) -> torch.Tensor:
        """(local_len,) int64: the position of each local token in its document."""
        lengths = self.mask.document_lengths
        if lengths is None:
            return self.indices
        starts = torch.tensor((0, *lengths[:-1]), device=self.device).cumsum(0)
        document = torch.searchsorted(starts, self.indices, right=True) - 1
        return self.indices - starts[document]

    def with_mask(self, mask: AttentionMask) -> "ShardedSequence":
        """The same shards under another mask, for another layer of the model.

        Raises:
            MaskError: the mask does not fit `seq_len`.
        """
        other = ShardedSequence.__new__(ShardedSequence)
        schedule = Schedule.of_layout(self.layout, self.schedule.sharding, mask)
        other._set_up(self.layout, self.mesh, schedule)
        return other

    def shard(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """This rank's part of a tensor that every rank holds whole.

        Args:
            x: any shape with `x.size(dim) == seq_len`.
            dim: the sequence dimension.

        Returns:
            A new contiguous tensor with `local_len` entries along `dim`, differentiable.

        Raises:
            InputError: `dim` does not have `seq_len` entries.
        """
        self._check_size(x, dim, self.seq_len, "seq_len")
        ranges = self._ranges(self.groups.ring.rank, self.groups.ulysses.rank)
        return torch.cat([x.narrow(dim, a, b - a) for a, b in ranges], dim)

    def unshard(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """Undo `shard`: the whole tensor, in global order, on every rank. A collective.

        Args:
            x: this rank's part, `x.size(dim) == local_len`; same other sizes on all ranks.
            dim: the sequence dimension.

        Raises:
            InputError: `dim` does not have `local_len` entries, or `x` would need a gradient:
                what each rank makes of the whole tensor is not this function's to guess.
        """
        self._check_size(x, dim, self.local_len, "local_len")
        if x.requires_grad and torch.is_grad_enabled():
            raise InputError(
                "unshard() passes no gradient; call it on x.detach() or under torch.no_grad(), and "
                "compute losses on the shards"
            )
        rows_first = x.movedim(dim, 0).contiguous()
        position = torch.cat(self.groups.ulysses.all_gather(rows_first, self.rank_lens))
        whole = rows_first.new_empty((self.seq_len, *rows_first.shape[1:]))
        gathered = self.groups.ring.all_gather(position, self.ring_lens)
        for ring_rank, piece in enumerate(gathered):
            for (start, stop), row in self.schedule.sharding.local_rows(ring_rank):
                whole[start:stop] = piece[row : row + stop - start]
        return whole.movedim(0, dim)

    def shard_batch(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """This rank's part of a language-model batch that every rank holds whole.

        `labels` (aligned with `input_ids`, as Hugging Face has them) are shifted to the next
        token *before* the cut, so no target is lost at a shard edge, and come out as
        `shift_labels`; the last token of the sequence and of each document has none (-100).

        Args:
            batch: any of `input_ids`, `labels`, `shift_labels`, `position_ids` (B, N) and
                `inputs_embeds` (B, N, hidden).

        Returns:
            The same with (B, local_len), and `position_ids` in each case: by default the position
            in the document.

        Raises:
            InputError: an entry of another name, or not N long; both kinds of labels.
        """
        known = ("input_ids", "labels", "shift_labels", "position_ids", "inputs_embeds")
        unknown = [name for name in batch if name not in known]
        if unknown:
            raise InputError(
                f"shard_batch() does not know how to cut {', '.join(unknown)}; it takes "
                f"{', '.join(known)}. Masks are given to ShardedSequence, e.g. mask=causal() & "
                "documents(lengths); other tensors can be cut with shard(x, dim)"
            )
        if not batch:
            raise InputError(f"shard_batch() got an empty batch; it takes {', '.join(known)}")
        if "labels" in batch and "shift_labels" in batch:
            raise InputError("shard_batch() got both labels and shift_labels; give one of them")
        local = {name: self.shard(x, 1) for name, x in batch.items() if name != "labels"}
        if "labels" in batch:
            local["shift_labels"] = self.shard(self._shifted(batch["labels"]), 1)
        if "position_ids" not in local:
            some = next(iter(local.values()))
            local["position_ids"] = self.position_ids.to(some.device).expand(some.size(0), -1)
        return local

    def _shifted(self, labels: torch.Tensor) -> torch.Tensor:
        self._check_size(labels, 1, self.seq_len, "seq_len")
        shifted = torch.full_like(labels, IGNORE_INDEX)
        shifted[:, :-1] = labels[:, 1:]
        lengths = self.mask.document_lengths
        if lengths is not None:
            ends = torch.tensor(lengths, device=labels.device).cumsum(0) - 1
            shifted[:, ends] = IGNORE_INDEX
        return shifted

    def _ranges(self, ring_rank: int, ulysses_rank: int) -> tuple[tuple[int, int], ...]:
        # A rank without tokens still needs a piece of the right shape.
        return self.schedule.sharding.rank_ranges(ring_rank, ulysses_rank) or ((0, 0),)

    def _check_size(self, x: torch.Tensor, dim: int, size: int, name: str) -> None:
        if not -x.ndim <= dim < x.ndim:
            raise InputError(f"dim {dim} is out of range for a tensor of shape {tuple(x.shape)}")
        if x.size(dim) != size:
            raise InputError(
                f"dim {dim} of a tensor of shape {tuple(x.shape)} has {x.size(dim)} entries, but "
                f"{name} is {size}"
            )
