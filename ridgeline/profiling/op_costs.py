"""The work of each op of a step: bytes it must move and FLOPs it must do, as kernels/cost.py counts
them for kernels and models/cost.py for attention over all layers.

Tensors are only asked for their sizes, so those that a call no longer has are made without memory.

    costs = op_costs(scopes.calls, facts)
    costs["layers.*.attn.qkv"].bytes
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ridgeline.kernels.cost import OpCost
from ridgeline.kernels.keep_tokens import op as keep_tokens
from ridgeline.kernels.moe import op as moe
from ridgeline.kernels.pages import Pages
from ridgeline.kernels.quantized_linear import op as quantized_linear
from ridgeline.kernels.rms_norm import op as rms_norm
from ridgeline.kernels.rotary import op as rotary
from ridgeline.kernels.rotary_pages import op as rotary_pages
from ridgeline.kernels.sampling import op as sampling
from ridgeline.kernels.skinny_linear import op as skinny_linear
from ridgeline.models.cost import StepCost
from ridgeline.models.transformer import ExpertMLP, Linear, RMSNorm, Transformer
from ridgeline.profiling.tracing.communication import link_bytes
from ridgeline.profiling.tracing.division import ATTENTION_OPS, COMMUNICATION_OPS, group_of
from ridgeline.profiling.tracing.scopes import ScopeCall
from ridgeline.quantization.block_linear import BlockLinear
from ridgeline.quantization.linear import QuantizedLinear

STORING = ("projected_attention", "attention")  # which also write the new keys and values


@dataclass(frozen=True)
class StepFacts:
    """What calls do not say of a step."""

    model: Transformer
    dtype: torch.dtype
    matrix: str  # which matrix ceiling its products have: "bf16"
    cost: StepCost  # of the whole step, for attention
    pages: Pages | None  # of the first layer; None in the plain loop
    num_tokens: int
    num_ranks: int = 1  # that run the step together


def op_costs(calls: Sequence[ScopeCall], facts: StepFacts) -> dict[str, OpCost]:
    """By group; what is not counted, such as additions, is left out. `calls` are one step's."""
    result: dict[str, OpCost] = {}
    for call in calls:
        cost = cost_of(call, facts)
        if cost is not None:
            name = group_of(call)
            result[name] = _sum(result[name], cost) if name in result else cost
    for name in ATTENTION_OPS:
        if any(call.name == name for call in calls):
            result[name] = attention_cost(name, facts)
    return result


def cost_of(call: ScopeCall, facts: StepFacts) -> OpCost | None:
    """Of one call; attention's is known for all layers together only."""
    counted = OF_OPS.get(call.name)
    if call.kind == "op":
        return None if counted is None else counted(call, facts)
    module = call.module
    if isinstance(module, BlockLinear):
        return _blocks(call, module, facts)
    if isinstance(module, QuantizedLinear):
        return _quantized(call, module, facts)
    if isinstance(module, Linear):
        return _product(call, module, facts)
    if isinstance(module, RMSNorm):
        return rms_norm.cost(_like(call.shape, facts.dtype), module.weight)
    if isinstance(module, ExpertMLP):
        return _experts(call, module, facts)
    if isinstance(module, nn.Embedding):
        moved = call.shape[0] * module.weight.shape[1] * module.weight.element_size()
        return OpCost(moved, moved)
    return None


def attention_cost(name: str, facts: StepFacts) -> OpCost:
    """Keys and values once, queries in and the output out."""
    cost, config = facts.cost, facts.model.config
    q_bytes = facts.num_tokens * config.q_size * config.num_layers * facts.dtype.itemsize
    written = q_bytes + (cost.kv_write_bytes if name in STORING else 0.0)
    return OpCost(cost.kv_read_bytes + q_bytes, written, cost.attention_flops, facts.matrix)


def _product(call: ScopeCall, module: Linear, facts: StepFacts) -> OpCost:
    x = _like(call.shape, facts.dtype)
    residual = _like((*call.shape[:-1], module.weight.shape[0]), facts.dtype)
    cost = skinny_linear.cost(
        x,
        module.weight,
        residual_MO=residual if call.has_residual else None,
        activation=call.activation,  # type: ignore[arg-type]
        bias_O=module.bias,
        norm_weight_D=call.norm,
    )
    return OpCost(cost.read_bytes, cost.written_bytes, cost.flops, facts.matrix)


def _quantized(call: ScopeCall, module: QuantizedLinear, facts: StepFacts) -> OpCost:
    """By codes, or by the copy in the model's dtype that serves many rows."""
    rows, outputs, depth = call.shape[0], module.out_features, module.in_features
    flops = 2.0 * rows * outputs * depth
    if module.copy is not None and rows >= module.copied_from:
        element = facts.dtype.itemsize
        read = module.copy.nbytes + rows * depth * element
        return OpCost(read, rows * outputs * element, flops, facts.matrix)
    x = _like((rows, depth), module.inputs or facts.dtype)
    cost = quantized_linear.cost(
        x,
        module.weight,
        weight_scale=module.scale,
        zero_GO=module.zero,
        bias_O=module.bias,
        norm_weight_D=call.norm,
    )
    matrix = facts.matrix if module.inputs is None else cost.matrix_dtype
    return OpCost(cost.read_bytes, cost.written_bytes, flops, matrix)


def _blocks(call: ScopeCall, module: BlockLinear, facts: StepFacts) -> OpCost:
    """The file's bytes; inputs become whole numbers on their way."""
    rows, outputs, depth = call.shape[0], module.out_features, module.in_features
    element = facts.dtype.itemsize
    read = module.weight.nbytes + rows * depth * element
    return OpCost(read, rows * outputs * element, 2.0 * rows * outputs * depth, "int8")


def _experts(call: ScopeCall, module: ExpertMLP, facts: StepFacts) -> OpCost:
    logits = _like((call.shape[0], module.gate_up.shape[0]), facts.dtype)
    x = _like(call.shape, facts.dtype)
    result = moe.cost(x, logits, module.gate_up, module.down, module.experts_per_token)
    return OpCost(result.read_bytes, result.written_bytes, result.flops, facts.matrix)


def _rotary_pages(call: ScopeCall, facts: StepFacts) -> OpCost | None:
    if facts.pages is None:
        return None
    slots = _like(call.shape[:1], torch.int32)
    return rotary_pages.cost(_like(call.shape, facts.dtype), None, slots, facts.pages)


def _rotary(call: ScopeCall, facts: StepFacts) -> OpCost:
    config = facts.model.config
    rotated = max((layer.rope.rotary_dim for layer in config.layers if layer.rope), default=0)
    angles = _like((call.shape[0], rotated // 2), torch.float32)
    return rotary.cost(_like(call.shape, facts.dtype), angles, angles)


def _sampling(call: ScopeCall, facts: StepFacts) -> OpCost:
    return sampling.cost(_like(call.shape, _logits_dtype(facts)))


def _keep_tokens(call: ScopeCall, facts: StepFacts) -> OpCost:
    logits = _like(call.shape, _logits_dtype(facts))
    return keep_tokens.cost(logits, _like(call.shape[:1], torch.int64))


def _step_start(call: ScopeCall, facts: StepFacts) -> OpCost:
    weight = facts.model.embed.weight
    moved = call.shape[0] * weight.shape[1] * weight.element_size()
    return OpCost(moved, moved)


def _between_ranks(call: ScopeCall, facts: StepFacts) -> OpCost:
    """What crosses the link, and not what it does to memory."""
    num_bytes = _like(call.shape, call.dtype or facts.dtype).nbytes
    return OpCost(0.0, link_bytes(call.name, num_bytes, facts.num_ranks))


OF_OPS: dict[str, Callable[[ScopeCall, StepFacts], OpCost | None]] = {
    "rotary": _rotary,
    "rotary_pages": _rotary_pages,
    "sampling": _sampling,
    "keep_tokens": _keep_tokens,
    "step_start": _step_start,
    **dict.fromkeys(COMMUNICATION_OPS, _between_ranks),
}


def _logits_dtype(facts: StepFacts) -> torch.dtype:
    on_cpu = facts.model.embed.weight.device.type == "cpu"
    return torch.float32 if on_cpu else facts.model.logits_dtype


def _like(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty(tuple(shape), dtype=dtype, device="meta")


def _sum(one: OpCost, other: OpCost) -> OpCost:
    return OpCost(
        one.read_bytes + other.read_bytes,
        one.written_bytes + other.written_bytes,
        one.flops + other.flops,
        one.matrix_dtype or other.matrix_dtype,
    )
