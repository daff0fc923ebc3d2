"""Over how many devices a model can be spread, and the part of its shape that each of them has.

rank_config(config, 2).num_heads        # half of config's; UsageError where that is no number
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ridgeline.errors import UsageError
from ridgeline.models import ModelConfig

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


def check_degree(config: ModelConfig, degree: int) -> None:
    problem = next(_problems(config, degree), None)
    if problem is not None:
        may_be = [str(n) for n in range(1, LARGEST + 1) if can_share(config, n)]
        raise UsageError(f"tensor_parallel is {degree}; {problem}; try one of {', '.join(may_be)}")


def can_share(config: ModelConfig, degree: int) -> bool:
    return not any(_problems(config, degree))


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
