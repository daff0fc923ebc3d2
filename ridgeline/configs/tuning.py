"""Searches of `ridgeline tune search`: functions that return a run, and what is searched in it.

ridgeline tune search configs:tiny_shapes --data book.txt --runs 20 --out study
"""

from __future__ import annotations

from dataclasses import replace

from ridgeline.configs.training import finetune_demo, lora_demo, pretrain_tiny
from ridgeline.training.config import RunLength
from ridgeline.tuning.searching.config import SearchConfig
from ridgeline.tuning.searching.space import Between, OneOf, SearchSpace


def demo_rates() -> SearchConfig:
    """Learning rate and batch of a fine-tune of `demo`."""
    base = replace(finetune_demo(), end=RunLength(tokens=200_000))
    space = SearchSpace((("lr", Between(1e-6, 1e-3)), ("batch", OneOf((4, 8, 16)))))
    return SearchConfig(base, space)


def demo_lora() -> SearchConfig:
    """Rank and learning rate of adapters of `demo`."""
    base = replace(lora_demo(), end=RunLength(tokens=200_000))
    space = SearchSpace((("lr", Between(5e-5, 5e-3)), ("lora", OneOf((4, 8, 16, 32)))))
    return SearchConfig(base, space)


def tiny_shapes() -> SearchConfig:
    """How a small network spends its parameters, with the learning rate that suits it."""
    base = replace(pretrain_tiny(), end=RunLength(steps=300))
    space = SearchSpace(
        (
            ("lr", Between(3e-4, 3e-2)),
            ("layers", OneOf((1, 2, 3, 4, 6))),
            ("heads", OneOf((2, 4, 8))),
        )
    )
    return SearchConfig(base, space, equal="parameters")
