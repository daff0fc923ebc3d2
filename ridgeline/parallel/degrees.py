"""Over how many devices a model can be spread, and the part of its shape that each of them has.

rank_config(config, 2).num_heads        # half of config's; UsageError where that is no number
rank_config(config, 2, expert=2)        # half of the experts, and not half of each
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import gcd

from ridgeline.errors import UsageError
from ridgeline.models import ExpertsConfig, ModelConfig
from ridgeline.parallel.layout import Layout, divisor_below

LARGEST = 64  # up to where degrees that would do are looked for


def rank_config(config: ModelConfig, degree: int, expert: int = 1) -> ModelConfig:
    """The part of the model that one of `degree` devices holds: heads, MLP columns and vocabulary
    are shared out, KV heads copied where there are fewer than devices, all else is on each. Of
    experts each has some columns, or with `expert`, which is then the degree, some of them whole.
    """
    if degree == 1:
        return config
    check_degree(config, degree, expert)
    layers = tuple(
        replace(layer, experts=_shared(layer.experts, degree, expert)) if layer.experts else layer
        for layer in config.layers
    )
    return replace(
        config,
        num_heads=config.num_heads // degree,
        num_kv_heads=max(1, config.num_kv_heads // degree),
        mlp_size=max(1, config.mlp_size // degree),
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


def _shared(experts: ExpertsConfig, degree: int, expert: int) -> ExpertsConfig:
    if expert == 1:
        return replace(experts, mlp_size=experts.mlp_size // degree)
    return replace(experts, held=experts.num_experts // expert)


def check_degree(config: ModelConfig, degree: int, expert: int = 1) -> None:
    assert expert in (1, degree), (expert, degree)
    if expert > 1:
        _check_experts(config, expert)
    problem = next(_problems(config, degree, expert > 1), None)
    if problem is not None:
        may_be = [str(n) for n in range(1, LARGEST + 1) if can_share(config, n, expert > 1)]
        raise UsageError(f"tensor_parallel is {degree}; {problem}; try one of {', '.join(may_be)}")


def _check_experts(config: ModelConfig, expert: int) -> None:
    counts = sorted({layer.experts.num_experts for layer in config.layers if layer.experts})
    if not counts:
        raise UsageError(
            f"expert_parallel is {expert}, and the model has no experts; remove --expert-parallel"
        )
    if any(count % expert for count in counts):
        both = [
            str(n)
            for n in range(2, LARGEST + 1)
            if not any(count % n for count in counts) and can_share(config, n, True)
        ]
        remedy = "remove --expert-parallel"
        if both:
            remedy = f"try one of {', '.join(both)} for both, or {remedy}"
        of_layers = " or ".join(map(str, counts))
        raise UsageError(
            f"expert_parallel is {expert}, which does not divide the {of_layers} experts of a "
            f"layer; {remedy}: each rank then has some columns of each expert"
        )


def can_share(config: ModelConfig, degree: int, whole_experts: bool = False) -> bool:
    return not any(_problems(config, degree, whole_experts))


def _problems(config: ModelConfig, degree: int, whole_experts: bool) -> Iterator[str]:
    counts = {"query heads": config.num_heads}
    if any(layer.experts is None for layer in config.layers) or not whole_experts:
        counts["MLP columns"] = config.mlp_size
    for layer in config.layers:
        if layer.experts is not None and not whole_experts:
            counts["columns of an expert"] = layer.experts.mlp_size
    for name, count in counts.items():
        if count % degree:
            yield f"{count} {name} cannot be shared evenly among that many devices"
    if config.num_kv_heads % degree and degree % config.num_kv_heads:
        yield f"{config.num_kv_heads} KV heads can be neither shared nor copied evenly"
