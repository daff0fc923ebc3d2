"""Over how many devices a model can be spread, and the part of its shape that each of them has.

rank_config(config, 2).num_heads        # half of config's; UsageError where that is no number
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import gcd

from ridgeline.errors import UsageError
from ridgeline.models import ModelConfig
from ridgeline.parallel.layout import Layout, divisor_below

LARGEST = 64  # up to where degrees that would do are looked for


def rank_config(config: ModelConfig, degree: int) -> ModelConfig:
    """The part of the model that one of `degree` devices holds: heads, MLP columns and vocabulary
    are shared out, KV heads copied where there are fewer than devices, all else is on each.
    """
    if degree == 1:
        return config
    check_degree(config, degree)
    layers = tuple(
        replace(layer, experts=replace(experts, mlp_size=experts.mlp_size // degree))
        if (experts := layer.experts)
        else layer
        for layer in config.layers
    )
    return replace(
        config,
        num_heads=config.num_heads // degree,
        num_kv_heads=max(1, config.num_kv_heads // degree),
        mlp_size=config.mlp_size // degree,
        vocab_size=-(-config.vocab_size // degree),
        layers=layers,
    )


def check_experts(config: ModelConfig, layout: Layout) -> None:
    """That the experts of every layer can be shared out whole."""
    if layout.expert == 1:
        return
    counts = {layer.experts.num_experts for layer in config.layers if layer.experts is not None}
    if not counts:
        raise UsageError(f"expert is {layout.expert}, and the model has no experts; remove it")
    for count in sorted(counts):
        if count % layout.expert:
            near = divisor_below(gcd(*counts, layout.size_of("gradient")), layout.expert)
            raise UsageError(
                f"expert is {layout.expert}, which does not divide the {count} experts of a "
                f"layer; try expert={near}"
            )


def check_degree(config: ModelConfig, degree: int) -> None:
    problem = next(_problems(config, degree), None)
    if problem is not None:
        may_be = [str(n) for n in range(1, LARGEST + 1) if not any(_problems(config, n))]
        raise UsageError(f"tensor_parallel is {degree}; {problem}; try one of {', '.join(may_be)}")


def _problems(config: ModelConfig, degree: int) -> Iterator[str]:
    counts = {"query heads": config.num_heads, "MLP columns": config.mlp_size}
    for layer in config.layers:
        if layer.experts is not None:
            counts["columns of an expert"] = layer.experts.mlp_size
    for name, count in counts.items():
        if count % degree:
            yield f"{count} {name} cannot be shared evenly among that many devices"
    if config.num_kv_heads % degree and degree % config.num_kv_heads:
        yield f"{config.num_kv_heads} KV heads can be neither shared nor copied evenly"
