"""The model's forward pass as training runs it: the same modules and weights as `Transformer`, with
the residual's sum inside the next norm, and activations kept or computed again as ordered.

A projection of another kind than a plain matrix (an adapter, codes) is called as the module it is.

    hidden_TD = hidden_states(model, batch, ForwardPlan(ops_for(device), "elementwise"))

Letters: T tokens, D hidden size, F MLP size, N query heads, K key-value heads, H head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ridgeline.data.loading.packing import PackedBatch
from ridgeline.kernels.attention import AttentionSpec
from ridgeline.kernels.document_attention import AttentionPath, Documents, document_attention
from ridgeline.kernels.rotary import Angles
from ridgeline.models import Transformer
from ridgeline.models.transformer import (
    Attention,
    Block,
    DenseMLP,
    ExpertMLP,
    RMSNorm,
    RopeAngles,
)
from ridgeline.parallel.mesh import Axis
from ridgeline.products import product_dtype
from ridgeline.training.config import Recomputation
from ridgeline.training.loss import head_loss
from ridgeline.training.methods.rounded import RoundedWeights
from ridgeline.training.stepping.context import CutBatch
from ridgeline.training.stepping.cut import MatrixCut
from ridgeline.training.stepping.experts import ExpertCut
from ridgeline.training.stepping.fp8 import Fp8Plan
from ridgeline.training.stepping.fused import (
    Passes,
    add_norm,
    gated_linear,
    heads,
    norm_linear,
    plain_norm,
    rotated,
    row_linear,
)
from ridgeline.training.stepping.gradient_products import DeferredGradients
from ridgeline.training.stepping.ops import TrainingOps


@dataclass(frozen=True)
class ForwardPlan:
    """How a forward pass runs."""

    ops: TrainingOps
    recomputation: Recomputation = "none"
    deterministic: bool = False  # attention's gradients are summed in one order
    fp8: Fp8Plan | None = None
    rounded: RoundedWeights | None = None
    attention: AttentionPath | None = None  # None: the fastest for what is given
    cut: MatrixCut | None = None  # each rank has a part of every matrix
    context: Axis | None = None  # each rank has some tokens of every sequence
    experts: ExpertCut | None = None  # each rank has some experts of every layer
    deferred: DeferredGradients | None = None  # where products leave weights' gradients for later

    @cached_property
    def passes(self) -> Passes:
        recomputes = self.recomputation in ("elementwise", "attention")
        return Passes(
            self.ops,
            recomputes,
            self.fp8,
            self.rounded,
            self.cut,
            self.experts,
            self.deferred,
        )


BlockPass = Callable[..., tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class PendingStream:
    """The residual stream, and an update that the next norm adds."""

    x_TD: Tensor
    update_TD: Tensor | None = None


class BatchDocuments:
    """What a forward pass needs of a batch's documents; the host waits for no device."""

    def __init__(self, batch: PackedBatch, plan: ForwardPlan) -> None:
        self.positions_T = batch.positions
        self._documents = Documents(batch.starts, batch.lengths, batch.is_padded)
        self._plan = plan
        self._cut = batch if isinstance(batch, CutBatch) else None
        assert (self._cut is None) == (plan.context is None), "all tokens on every rank of context"

    @cached_property
    def lengths_T(self) -> Tensor:
        if self._cut is not None:
            return self._cut.document_lengths
        lengths = self._documents.starts.diff()
        return lengths.repeat_interleave(lengths, output_size=len(self.positions_T))

    def attend(self, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, spec: AttentionSpec) -> Tensor:
        dtype = product_dtype(q_TNH.dtype, q_TNH.device)
        q, k, v = (each.to(dtype) for each in (q_TNH, k_TKH, v_TKH))
        keys = None
        if self._cut is not None:
            shares, axis = self._cut.plan_for(spec), self._plan.context
            assert axis is not None
            (k, v), keys = shares.shared(k, v, axis), shares.documents
        out_TNH = document_attention(
            q, k, v, self._documents, spec, self._plan.attention, self._plan.deterministic, keys
        )
        return out_TNH.to(q_TNH.dtype)


def hidden_states(model: Transformer, batch: PackedBatch, plan: ForwardPlan) -> Tensor:
    """[T, D] after the last norm: what the head takes."""
    stream = run_layers(model.layers, embedded(model, batch.ids, plan), batch, plan)
    return add_norm(stream.update_TD, stream.x_TD, model.norm, plan.passes)[0]


def run_layers(
    blocks: Iterable[nn.Module], x_TD: Tensor, batch: PackedBatch, plan: ForwardPlan
) -> PendingStream:
    """The stream behind these layers."""
    layers = [block for block in blocks if isinstance(block, Block)]
    documents = BatchDocuments(batch, plan)
    ropes = {block.attn.rope for block in layers if block.attn.rope is not None}
    angles = {rope: rope.angles(documents.positions_T, documents.lengths_T) for rope in ropes}
    stream = PendingStream(x_TD)
    for block in layers:
        stream = run_block(block, stream, angles, documents, plan)
    return stream


def loss_of(model: Transformer, batch: PackedBatch, plan: ForwardPlan) -> Tensor:
    """Of the text, summed over the batch's counted tokens."""
    return loss_behind(model, hidden_states(model, batch, plan), batch, plan)


def loss_behind(
    model: Transformer, hidden_TD: Tensor, batch: PackedBatch, plan: ForwardPlan
) -> Tensor:
    if plan.cut is not None:
        return plan.cut.loss(hidden_TD, model.head.weight, batch.targets, model.config)
    return head_loss(model, hidden_TD, batch.targets)


def embedded(model: Transformer, ids_T: Tensor, plan: ForwardPlan) -> Tensor:
    """The stream that the first block takes."""
    if plan.cut is None:
        x_TD: Tensor = model.embed(ids_T)
    else:
        x_TD = plan.cut.embedded(model.embed.weight, ids_T)
    return x_TD if model.embedding_factor == 1.0 else x_TD * model.embedding_factor


def run_block(
    block: Block,
    stream: PendingStream,
    angles: RopeAngles,
    documents: BatchDocuments,
    plan: ForwardPlan,
) -> PendingStream:
    """By the block's own `training_pass`, where it has one that gathers its weights first."""
    own: BlockPass = getattr(block, "training_pass", None) or partial(block_pass, block)
    update_TD, x_TD = own(stream.update_TD, stream.x_TD, angles, documents, plan)
    return PendingStream(x_TD, update_TD)


def block_pass(
    block: Block,
    update_TD: Tensor | None,
    x_TD: Tensor,
    angles: RopeAngles,
    documents: BatchDocuments,
    plan: ForwardPlan,
) -> tuple[Tensor, Tensor]:
    def attend(update_TD: Tensor | None, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        return attention_half(block, PendingStream(x_TD, update_TD), angles, documents, plan.passes)

    def think(update_TD: Tensor, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        return mlp_half(block, PendingStream(x_TD, update_TD), plan.passes)

    def whole(update_TD: Tensor | None, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        return think(*attend(update_TD, x_TD))

    if plan.recomputation == "blocks":
        return again(whole, update_TD, x_TD)
    if plan.recomputation == "attention":
        return think(*again(attend, update_TD, x_TD))
    return whole(update_TD, x_TD)


def again(
    function: Callable[..., tuple[Tensor, Tensor]], *inputs: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Run it, keep its inputs alone, and run it once more in the backward pass. Nothing in it is
    random, so that no generator's state has to be kept.
    """
    if not torch.is_grad_enabled():
        return function(*inputs)
    result: Any = checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False)
    return result


def attention_half(
    block: Block,
    stream: PendingStream,
    angles: RopeAngles,
    documents: BatchDocuments,
    passes: Passes,
) -> tuple[Tensor, Tensor]:
    """The update that attention makes, and the stream that it was made from."""
    attn = block.attn
    qkv_TC, x_TD = norm_linear(stream.update_TD, stream.x_TD, block.attn_norm, attn.qkv, passes)
    turns = None if attn.rope is None else angles[attn.rope]
    out_TNH = documents.attend(*split_heads(attn, qkv_TC, turns, passes), attn.spec)
    update_TD = row_linear(out_TNH.flatten(1), attn.out, passes)
    return finished(block, update_TD, block.attn_post_norm, passes), x_TD


def mlp_half(block: Block, stream: PendingStream, passes: Passes) -> tuple[Tensor, Tensor]:
    mlp = block.mlp
    if isinstance(mlp, DenseMLP):
        gate_up_T2F, x_TD = norm_linear(
            stream.update_TD, stream.x_TD, block.mlp_norm, mlp.gate_up, passes
        )
        update_TD = gated_linear(gate_up_T2F, mlp.down, mlp.activation, passes)
    else:
        x_TD = stream.x_TD if stream.update_TD is None else stream.update_TD + stream.x_TD
        update_TD = experts_update(mlp, x_TD, block.mlp_norm, passes)
    return finished(block, update_TD, block.mlp_post_norm, passes), x_TD


def experts_update(mlp: ExpertMLP, x_TD: Tensor, norm: RMSNorm, passes: Passes) -> Tensor:
    if passes.cut is None and passes.experts is None:
        update_TD: Tensor = mlp(x_TD, norm)
        return update_TD
    normed_TD = plain_norm(x_TD, norm, passes)
    if passes.cut is not None:
        normed_TD = passes.cut.enter(normed_TD)
    routed = mlp.routed if passes.experts is None else partial(passes.experts.routed, mlp)
    update_TD = routed(normed_TD)
    return update_TD if passes.cut is None else passes.cut.leave(update_TD)


def split_heads(
    attn: Attention, qkv_TC: Tensor, turns: Angles | None, passes: Passes
) -> tuple[Tensor, Tensor, Tensor]:
    """q_TNH, k_TKH and v_TKH, normed and rotated."""
    if attn.q_norm is None or attn.k_norm is None:
        return heads(qkv_TC, attn.sizes, attn.head_dim, turns, passes)
    q, k, v = qkv_TC.split(attn.sizes, dim=-1)
    q_TNH, k_TKH, v_TKH = (part.unflatten(-1, (-1, attn.head_dim)) for part in (q, k, v))
    q_TNH = rotated(plain_norm(q_TNH, attn.q_norm, passes), turns, passes)
    return q_TNH, rotated(plain_norm(k_TKH, attn.k_norm, passes), turns, passes), v_TKH


def finished(block: Block, update_TD: Tensor, post_norm: RMSNorm | None, passes: Passes) -> Tensor:
    """The update as it is added to the stream."""
    if post_norm is not None:
        update_TD = plain_norm(update_TD, post_norm, passes)
    return update_TD if block.residual_scale == 1.0 else update_TD * block.residual_scale
