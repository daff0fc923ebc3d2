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
from ridgeline.kernels.skinny_linear.cuda_space import OneRow, WorkSplit
from ridgeline.kernels.skinny_linear.tune_space import SkinnyConfig

log = logging.getLogger(__name__)


def best(
    op: str, key: str, device: torch.device, source: str
) -> SkinnyConfig | WorkSplit | OneRow | None:
    """What was measured to be fastest, of what can run here; `source` is the op whose cuda.cu has
    the kernels.
    """
    built = device.type == "cuda" and library(source) is not None
    values = chosen(op, key, device, lambda config: built or config_type(config) is SkinnyConfig)
    return None if values is None else config_type(values)(**values)


def config_type(config: Mapping[str, Any]) -> type[SkinnyConfig | WorkSplit | OneRow]:
    """Configs are saved as plain values; only WorkSplit has tiles, only OneRow lines."""
    return WorkSplit if "tiles" in config else OneRow if "lines" in config else SkinnyConfig


def run(
    config: SkinnyConfig | WorkSplit | OneRow | None,
    prefers_cuda: bool,
    in_cuda: Callable[[WorkSplit | OneRow | None], Tensor],
    in_triton: Callable[[SkinnyConfig | None], Tensor],
) -> Tensor:
    """The product as `config` says; Triton makes what the CUDA kernels do not do (a stride that is
    not a multiple of 16 bytes, say).
    """
    if isinstance(config, WorkSplit | OneRow) or (config is None and prefers_cuda):
        try:
            return in_cuda(config)
        except UnsupportedError as error:
            _log_once(str(error))
    return in_triton(config if isinstance(config, SkinnyConfig) else None)


@lru_cache
def _log_once(reason: str) -> None:
    log.info("falling back from CUDA C++ to Triton for a product: %s", reason)
