"""Networks of other layers, widths and heads that cost as much as a shape: in parameters of their
layers, or in the FLOPs of a token in them. The width makes them equal where it is free, else that
of the MLP. Embedding and head are left out, as in scaling laws. Costs are models/cost.py's.

    equal_shape("tiny", {"layers": 4}, "parameters")        # "tiny:layers=4,width=88,mlp=176"
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

from ridgeline.errors import UsageError
from ridgeline.models.config import ModelConfig
from ridgeline.models.cost import Chunk, num_parameters, step_cost
from ridgeline.models.shapes import describe_shape, shape_name

Equal = Literal["free", "parameters", "flops"]
SHAPE_PARTS = ("layers", "width", "heads")
CONTEXT = 512  # tokens before the one whose FLOPs are counted
MOST_APART = 0.02  # of the cost: sizes come in steps


def cost_of(config: ModelConfig, equal: Equal) -> float:
    """Of the layers."""
    if equal == "flops":
        token = [Chunk(1, CONTEXT)]
        return step_cost(config, token, weight_bytes=2, kv_bytes=2, logit_rows=0).flops
    tables = 1 if config.tied_embeddings else 2
    return float(num_parameters(config) - tables * config.vocab_size * config.hidden_size)


def equal_shape(base: str, parts: Mapping[str, int], equal: Equal) -> str:
    """The name of a shape with these parts, as `describe_shape` takes it."""
    config = describe_shape(base).config
    ratio = config.mlp_size / config.hidden_size
    heads = parts.get("heads", config.num_heads)
    if equal == "free":
        width = parts.get("width")
        changes = dict(parts) | ({} if width is None else {"mlp": round(ratio * width)})
        return shape_name(base, changes)
    goal, changes = cost_of(config, equal), dict(parts)
    if "width" not in parts:
        step = 2 * heads  # rotations take pairs of a head's dims
        changes["width"] = step * _nearest(
            goal, lambda n: _cost(base, equal, changes, width=n * step, mlp=round(ratio * n * step))
        )
    changes["mlp"] = _nearest(goal, lambda size: _cost(base, equal, changes, mlp=size))
    apart = abs(_cost(base, equal, changes) / goal - 1)
    if apart > MOST_APART:
        given = ", ".join(f"{name} {value}" for name, value in parts.items())
        raise UsageError(
            f"no network with {given} comes nearer than {apart:.0%} to the {equal} of {base}; "
            "give other values, or leave out --equal"
        )
    return shape_name(base, changes)


def _cost(base: str, equal: Equal, changes: Mapping[str, int], **more: int) -> float:
    name = shape_name(base, dict(changes) | more)
    return cost_of(describe_shape(name).config, equal)


def _nearest(goal: float, cost: Callable[[int], float]) -> int:
    """The number from 1 whose cost, which grows with it, is nearest to the goal: by halving."""
    low, high = 1, 2
    while cost(high) < goal:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if cost(middle) < goal else (low, middle)
    return min((low, high), key=lambda count: abs(cost(count) - goal))
