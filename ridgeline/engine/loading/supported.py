"""What a recipe can ask for and the engine cannot do is refused, never ignored; what "auto"
means for the kernels of a CPU; and a line where a GPU's were not built.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import cache

import torch

from ridgeline.errors import UnsupportedError
from ridgeline.kernels.attention.heads import check_heads
from ridgeline.kernels.extension import built_path, find_nvcc, sources
from ridgeline.kernels.host_library import prepare
from ridgeline.models import ModelConfig
from ridgeline.progress import Progress
from ridgeline.quantization.devices import check_runs
from ridgeline.quantization.scheme import parse_scheme
from ridgeline.recipe import Recipe

log = logging.getLogger(__name__)


def check_supported(recipe: Recipe, device: str) -> None:
    """`recipe` has nothing left to "auto"."""
    on_gpu_by_reference = recipe.kernels == "reference" and recipe.graphs
    for is_set, what in (
        (recipe.deterministic and recipe.scheme, f"deterministic and scheme {recipe.scheme}"),
        (recipe.deterministic and recipe.head != "plain", f"deterministic and head {recipe.head}"),
        (recipe.deterministic and _codes_in_fp16(recipe), "deterministic, fp16 and an 8-bit KV"),
        (recipe.deterministic and recipe.copies, "deterministic and copies"),
        (recipe.parallel.num_ranks > 1 and recipe.copies, "several ranks and copies"),
        (recipe.parallel.pipeline > 1 and recipe.graphs, "pipeline parallel and graphs"),
        (on_gpu_by_reference, "kernels reference on a GPU"),
    ):
        if is_set:
            raise UnsupportedError(f"the recipe has {what}, which the engine does not do yet")
    for scheme in (recipe.scheme, None if recipe.head == "plain" else recipe.head):
        if scheme is not None:
            check_runs(parse_scheme(scheme), recipe.dtype, device)
    if recipe.copies and device == "cpu":
        raise UnsupportedError(
            "copies of weights speed up large steps on a GPU, and the device is a CPU; "
            "remove --copies"
        )


def check_on_device(config: ModelConfig, device: str) -> None:
    """A model whose every request would fail there is refused before it is loaded."""
    if device != "cpu":
        check_heads(config.num_heads, config.num_kv_heads, config.head_dim)


def _codes_in_fp16(recipe: Recipe) -> bool:
    """fp16 takes the scales of 8-bit keys and values tile by tile, which rounds by tile."""
    return recipe.dtype == "fp16" and recipe.kv.dtype in ("int8", "fp8")


def mention_unbuilt(recipe: Recipe, device: str) -> None:
    """One line where Triton serves in the place of CUDA C++ that nobody has built. int4 at batch 1
    had 455 tokens/s instead of 674 on an H200 (2026-11-17).
    """
    wanted = is_nvidia(device) and recipe.tuned and recipe.kernels == "fused"
    if wanted and any(not built_path(op).is_file() for op in sources()):
        _mention_once(find_nvcc() is not None)


@cache
def _mention_once(has_nvcc: bool) -> None:
    command = "`ridgeline kernels build`" if has_nvcc else "nvcc and `ridgeline kernels build`"
    verb = "makes" if has_nvcc else "make"
    log.warning(
        "CUDA C++ kernels are not built; %s %s int4 decoding about 1.5× as fast", command, verb
    )


def is_nvidia(device: str) -> bool:
    return device.startswith("cuda") and torch.version.hip is None


def with_host_kernels(
    given: Recipe, filled: Recipe, config: ModelConfig, device: str, progress: Progress | None
) -> Recipe:
    """On a CPU "auto" and "fused" mean its own kernels, which are built now where they are not yet;
    where they cannot be, "auto" means the references.
    """
    if device != "cpu" or given.kernels == "reference":
        return filled
    problem = "they could not be built (the log says why)"
    if any(layer.experts for layer in config.layers):
        problem = "those of experts are not written"
    elif given.deterministic:
        problem = "their sums depend on the number of rows, and deterministic is on"
    elif prepare(progress):
        return replace(filled, kernels="fused")
    if given.kernels == "fused":
        raise UnsupportedError(f"kernels is fused, and on a CPU {problem}; leave it out")
    log.info("the CPU runs reference kernels: %s", problem)
    return filled
