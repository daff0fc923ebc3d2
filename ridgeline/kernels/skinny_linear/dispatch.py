"""Which implementation makes a product of few rows: the one measured to be fastest on this kind of
GPU, of those that can run here.

A choice is a `SkinnyConfig` (Triton), or a `WorkSplit` or `OneRow` (CUDA C++, once built); where
nothing was measured it is None, and `prefers_cuda` says which of the two serves.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ridgeline.errors import UnsupportedError
from ridgeline.kernels.autotune import chosen
from ridgeline.kernels.extension import library
from ridgeline.kernels.skinny_linear.tune_space import SkinnyConfig
from ridgeline.kernels.skinny_linear.ways import OneRow, WorkSplit

log = logging.getLogger(__name__)


def best(op: str, key: str, device: torch.device) -> SkinnyConfig | WorkSplit | OneRow | None:
    """What was measured to be fastest, of what can run here."""
    built = device.type == "cuda" and library("skinny_linear") is not None
    found = chosen(op, key, device, lambda config: built or kind_of(config) is SkinnyConfig)
    return None if found is None else kind_of(found)(**found)


def kind_of(config: Mapping[str, Any]) -> type[SkinnyConfig | WorkSplit | OneRow]:
    """Configurations are remembered as plain values; only a Way has tiles, only OneRow lines."""
    return WorkSplit if "tiles" in config else OneRow if "lines" in config else SkinnyConfig


def run(
    way: SkinnyConfig | WorkSplit | OneRow | None,
    prefers_cuda: bool,
    in_cuda: Callable[[WorkSplit | OneRow | None], Tensor],
    in_triton: Callable[[SkinnyConfig | None], Tensor],
) -> Tensor:
    """The product as `way` says; Triton makes what the CUDA kernels do not do (a stride that is not
    a multiple of 16 bytes, say).
    """
    if isinstance(way, WorkSplit | OneRow) or (way is None and prefers_cuda):
        try:
            return in_cuda(way)
        except UnsupportedError as error:
            _say_once(str(error))
    return in_triton(way if isinstance(way, SkinnyConfig) else None)


@lru_cache
def _say_once(reason: str) -> None:
    log.info("Triton serves a product instead of CUDA C++: %s", reason)
