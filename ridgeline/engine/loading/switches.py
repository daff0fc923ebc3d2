"""What a recipe switches for the time of a step: torch's tf32, and choices made for this GPU. These
are states of the process, so they are put back behind every step: engines with other recipes may
live beside.

    with switches(recipe)(): ...
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

import torch

from ridgeline.errors import UnsupportedError
from ridgeline.kernels.autotune import at_places, parse_places, untuned
from ridgeline.recipe import Recipe

Switches = Callable[[], AbstractContextManager[None]]


def switches(recipe: Recipe) -> Switches:
    """What to enter around each step. As nothing is switched in most recipes, mostly nothing."""
    if recipe.tuned and not recipe.tf32 and not recipe.tiles:
        return nullcontext
    return lambda: _switched(recipe)


@contextmanager
def _switched(recipe: Recipe) -> Iterator[None]:
    with ExitStack() as stack:
        if not recipe.tuned:
            stack.enter_context(untuned())
        if recipe.tiles:
            stack.enter_context(at_places(parse_places(recipe.tiles)))
        if recipe.tf32:
            stack.enter_context(_tf32())
        yield


@contextmanager
def _tf32() -> Iterator[None]:
    settings = torch.backends.cuda.matmul
    before = settings.fp32_precision
    settings.fp32_precision = "tf32"
    try:
        yield
    finally:
        settings.fp32_precision = before


def check_switches(recipe: Recipe, device: str) -> None:
    """`recipe` has nothing left to "auto"."""
    if recipe.tf32 and device == "cpu":
        raise UnsupportedError("tf32 requires a GPU, and the device is a CPU; remove --tf32")
    if not recipe.tuned and device == "cpu":
        raise UnsupportedError(
            "--no-tuned chooses between kernels of a GPU, and the device is a CPU; remove it"
        )
    if recipe.tiles and device == "cpu":
        raise UnsupportedError(
            "--tiles chooses among kernels of a GPU, and the device is a CPU; remove it"
        )
    if recipe.blocks and device != "cpu":
        raise UnsupportedError(
            f"--blocks multiplies a GGUF file's blocks on a CPU, and the device is {device}; "
            "remove it"
        )
    if recipe.blocks and (recipe.scheme is not None or recipe.deterministic):
        other = f"scheme {recipe.scheme}" if recipe.scheme else "deterministic"
        raise UnsupportedError(
            f"the recipe has blocks and {other}, whose products are others; remove one"
        )
    if recipe.tiles and not recipe.tuned:
        raise UnsupportedError("--tiles chooses among tuned kernels; remove --no-tuned")
    if recipe.tf32 and recipe.dtype != "fp32":
        raise UnsupportedError(
            f"tf32 rounds products of fp32, and the dtype is {recipe.dtype}; remove --tf32"
        )
    for switched, what in (
        (recipe.tf32, "tf32"),
        (not recipe.tuned, "no tuned kernels"),
        (bool(recipe.tiles), "other tiles"),
    ):
        for is_set, other in (
            (recipe.deterministic, "deterministic"),
            (recipe.parallel.num_ranks > 1, "several ranks"),
        ):
            if switched and is_set:
                raise UnsupportedError(
                    f"the recipe has {what} and {other}, which the engine does not do yet"
                )
