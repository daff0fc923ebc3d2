"""Between a checkpoint's tensor names and ours: which part of which of our parameters each tensor
is.

Ours are fused (one qkv, one gate-up, experts stacked); checkpoints mostly keep the pieces apart.
`Names` is one family's table of names, `parts` spells it out for a config. Loading copies each
tensor into its part; saving cuts each part out under its name: one table, both ways.

    for part in parts(config, HF_NAMES): print(part.name, "->", part.parameter, part.index)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ridgeline.models.config import ModelConfig

TensorChange = Callable[[Tensor], Tensor]
Index = tuple[int | slice, ...]


@dataclass(frozen=True)
class WeightPart:
    name: str  # in the checkpoint
    parameter: str  # in our model
    index: Index  # which part of the parameter; () is all of it
    change: TensorChange | None = None  # what a stored tensor needs before it is ours (GGUF only)


@dataclass(frozen=True)
class Names:
    """Templates; {i} is the layer and {e} the expert. Several names stand for pieces laid one after
    the other.
    """

    embed: str = "model.embed_tokens.weight"
    norm: str = "model.norm.weight"
    head: str = "lm_head.weight"
    attn_norm: str = "model.layers.{i}.input_layernorm.weight"
    attn_post_norm: str = "model.layers.{i}.post_attention_layernorm.weight"
    mlp_norm: str = "model.layers.{i}.post_attention_layernorm.weight"
    mlp_post_norm: str = "model.layers.{i}.post_feedforward_layernorm.weight"
    q_norm: str = "model.layers.{i}.self_attn.q_norm.weight"
    k_norm: str = "model.layers.{i}.self_attn.k_norm.weight"
    qkv: tuple[str, ...] = (
        "model.layers.{i}.self_attn.q_proj.weight",
        "model.layers.{i}.self_attn.k_proj.weight",
        "model.layers.{i}.self_attn.v_proj.weight",
    )
    out: str = "model.layers.{i}.self_attn.o_proj.weight"
    gate_up: tuple[str, ...] = (
        "model.layers.{i}.mlp.gate_proj.weight",
        "model.layers.{i}.mlp.up_proj.weight",
    )
    down: str = "model.layers.{i}.mlp.down_proj.weight"
    router: str = "model.layers.{i}.mlp.gate.weight"
    expert_gate_up: tuple[str, str] = (
        "model.layers.{i}.mlp.experts.{e}.gate_proj.weight",
        "model.layers.{i}.mlp.experts.{e}.up_proj.weight",
    )
    expert_down: str = "model.layers.{i}.mlp.experts.{e}.down_proj.weight"
    norm_change: TensorChange | None = None  # applied to every norm
    q_change: Callable[[ModelConfig], TensorChange] | None = (
        None  # applied to the query projection's rows
    )
    k_change: Callable[[ModelConfig], TensorChange] | None = None  # and to the key projection's


HF_NAMES = Names()


@dataclass(frozen=True)
class GgufForm:
    """How a family looks in a GGUF file."""

    architecture: str  # what `general.architecture` says
    names: Names
    fields: Callable[[Mapping[str, Any], str], dict[str, Any]] = lambda metadata, prefix: {}


def parts(config: ModelConfig, names: Names) -> Iterator[WeightPart]:
    """Every tensor a complete checkpoint of this model holds."""
    yield WeightPart(names.embed, "embed.weight", ())
    for i in range(config.num_layers):
        for part in _layer_parts(config, names, i):
            yield WeightPart(
                part.name.replace("{i}", str(i)),
                f"layers.{i}.{part.parameter}",
                part.index,
                part.change,
            )
    yield WeightPart(names.norm, "norm.weight", (), names.norm_change)
    if not config.tied_embeddings:
        yield WeightPart(names.head, "head.weight", ())


def _layer_parts(config: ModelConfig, names: Names, i: int) -> Iterator[WeightPart]:
    norms = {"attn_norm": names.attn_norm, "mlp_norm": names.mlp_norm}
    if config.post_norms:
        norms |= {"attn_post_norm": names.attn_post_norm, "mlp_post_norm": names.mlp_post_norm}
    if config.qk_norm:
        norms |= {"attn.q_norm": names.q_norm, "attn.k_norm": names.k_norm}
    for parameter, name in norms.items():
        yield WeightPart(name, f"{parameter}.weight", (), names.norm_change)

    yield from _with_bias(_qkv_parts(config, names), config.qkv_bias)
    yield from _with_bias([WeightPart(names.out, "attn.out.weight", ())], config.out_bias)
    experts = config.layers[i].experts
    if experts is not None:
        yield WeightPart(names.router, "mlp.router.weight", ())
        yield from _expert_parts(names, experts.num_experts, experts.mlp_size)
        return
    gate_up = _rows(names.gate_up, "mlp.gate_up.weight", [config.mlp_size, config.mlp_size])
    yield from _with_bias(gate_up, config.mlp_bias)
    yield from _with_bias([WeightPart(names.down, "mlp.down.weight", ())], config.mlp_bias)


def _qkv_parts(config: ModelConfig, names: Names) -> list[WeightPart]:
    pieces = _rows(names.qkv, "attn.qkv.weight", [config.q_size, config.kv_size, config.kv_size])
    changes = [
        names.q_change(config) if names.q_change else None,
        names.k_change(config) if names.k_change else None,
    ]
    return [
        WeightPart(piece.name, piece.parameter, piece.index, change)
        for piece, change in zip(pieces, [*changes, None], strict=False)
    ]


def _rows(names: tuple[str, ...], parameter: str, sizes: list[int]) -> list[WeightPart]:
    """Pieces laid one after the other along the rows; a single name is the parameter as a whole."""
    if len(names) == 1:
        return [WeightPart(names[0], parameter, ())]
    parts, start = [], 0
    for name, size in zip(names, sizes, strict=True):
        parts.append(WeightPart(name, parameter, (slice(start, start + size),)))
        start += size
    return parts


def _expert_parts(names: Names, num_experts: int, mlp_size: int) -> Iterator[WeightPart]:
    gate, up = names.expert_gate_up
    gate_rows, up_rows = slice(0, mlp_size), slice(mlp_size, 2 * mlp_size)
    if "{e}" not in gate:  # the checkpoint stacks the experts as we do
        yield WeightPart(gate, "mlp.gate_up", (slice(None), gate_rows))
        yield WeightPart(up, "mlp.gate_up", (slice(None), up_rows))
        yield WeightPart(names.expert_down, "mlp.down", ())
        return
    for e in range(num_experts):
        yield WeightPart(gate.replace("{e}", str(e)), "mlp.gate_up", (e, gate_rows))
        yield WeightPart(up.replace("{e}", str(e)), "mlp.gate_up", (e, up_rows))
        yield WeightPart(names.expert_down.replace("{e}", str(e)), "mlp.down", (e,))


def _with_bias(weights: list[WeightPart], has_bias: bool) -> Iterator[WeightPart]:
    for part in weights:
        yield part
        if has_bias:
            name, parameter = (
                text.removesuffix("weight") + "bias" for text in (part.name, part.parameter)
            )
            yield WeightPart(name, parameter, part.index, part.change)
