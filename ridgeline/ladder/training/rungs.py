"""The changes around the best config so far, in the ladder's order: what each would change, or one
line why it does not apply. What a user has set is left as it is.

    for rung in RUNGS: rung.offer(context)      # TrainOffer(...) or "this CPU has no ..."
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from ridgeline.models import ModelConfig
from ridgeline.models.training_cost import LEVELS
from ridgeline.products import product_dtype
from ridgeline.profiling.predicting.prediction import Area
from ridgeline.training.config import Recomputation, TrainConfig
from ridgeline.training.memory.methods import TrainingMethod
from ridgeline.training.memory.plan import itemise
from ridgeline.training.stepping.captured import graphs_problem
from ridgeline.training.stepping.precision import has_fp8

LEVEL_WORDS = {
    "none": "nothing computed again",
    "elementwise": "norms and activations computed again",
    "attention": "attention computed again",
    "blocks": "whole blocks computed again",
}


@dataclass(frozen=True)
class TrainContext:
    model: ModelConfig
    ordered: TrainConfig  # what the user left open is open
    defaults: TrainConfig  # as `train` fills it in
    device: str
    free_bytes: int  # before anything was loaded
    method: TrainingMethod = field(default_factory=TrainingMethod)

    def fits(self, config: TrainConfig) -> bool:
        return itemise(self.model, config, self.device, self.free_bytes, self.method).fits


class TrainOffer(NamedTuple):
    name: str  # "micro-batch-8"
    title: str
    config: TrainConfig
    why: str
    alters: bool = False  # what is learned, beyond the order of sums


@dataclass(frozen=True)
class TrainRung:
    name: str
    area: Area
    title: str
    offer: Callable[[TrainContext, TrainConfig], TrainOffer | str]  # at the best so far


def with_micro(config: TrainConfig, micro: int) -> TrainConfig:
    return replace(config, batch=replace(config.batch, micro=micro))


def divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def bf16(context: TrainContext, best: TrainConfig) -> TrainOffer | str:
    if context.ordered.precision != "auto":
        return f"--precision {context.ordered.precision} is given"
    if computes_in_bf16(context.defaults):
        return "`train` computes in bf16 by default"
    device = torch.device("cpu" if context.device == "cpu" else "cuda")
    if product_dtype(torch.bfloat16, device) != torch.bfloat16:
        return "this CPU multiplies bf16 through fp32, which takes longer than fp32 itself"
    return TrainOffer(
        "bf16", "compute in bf16", replace(best, precision="bf16"),
        "products of half the bytes, exact fp32 weights in the optimizer", alters=True,
    )  # fmt: skip


def computes_in_bf16(config: TrainConfig) -> bool:
    return config.precision.startswith(("bf16", "fp8"))


def less_recomputation(context: TrainContext, best: TrainConfig) -> TrainOffer | str:
    """The next level down, with the largest micro-batch that fits then."""
    if context.ordered.recomputation != "auto":
        return f"--recomputation {context.ordered.recomputation} is given"
    level = LEVELS.index(best.recomputation)
    if level == 0:
        return "nothing is computed again by default: it fits into memory"
    for less in reversed(LEVELS[:level]):
        recomputation: Recomputation = less  # type: ignore[assignment]
        for micro in _sizes_down(context, best):
            config = with_micro(replace(best, recomputation=recomputation), micro)
            if context.fits(config):
                words = LEVEL_WORDS[less]
                return TrainOffer(
                    f"recompute-{less}", f"{words}, micro-batch {micro}", config,
                    f"it fits with {micro} sequences in a pass",
                )  # fmt: skip
    return f"keeping more than with {best.recomputation} does not fit into memory"


def _sizes_down(context: TrainContext, best: TrainConfig) -> list[int]:
    """Micro-batches from the best's downward; the given one alone."""
    assert best.batch.micro is not None, "nothing is open"
    if context.ordered.batch.micro is not None:
        return [best.batch.micro]
    sizes = divisors(best.batch.size)
    return [size for size in reversed(sizes) if size <= best.batch.micro]


def larger_micro_batch(context: TrainContext, best: TrainConfig) -> TrainOffer | str:
    return _other_micro_batch(context, best, is_larger=True)


def smaller_micro_batch(context: TrainContext, best: TrainConfig) -> TrainOffer | str:
    return _other_micro_batch(context, best, is_larger=False)


def _other_micro_batch(
    context: TrainContext, best: TrainConfig, is_larger: bool
) -> TrainOffer | str:
    """The next one; where it is kept, the one behind it is offered then."""
    now, all_sizes = best.batch.micro, divisors(best.batch.size)
    assert now is not None, "nothing is open"
    if context.ordered.batch.micro is not None:
        return f"--micro-batch {now} is given"
    sizes = [size for size in all_sizes if (size > now if is_larger else size < now)]
    if not sizes:
        end = "the whole batch goes" if is_larger else "one sequence goes"
        return f"{end} through the model at once already"
    size = min(sizes) if is_larger else max(sizes)
    config = with_micro(best, size)
    if not context.fits(config):
        return f"{size} sequences at once do not fit into memory"
    count = best.batch.size // size
    passes = "one pass" if count == 1 else f"{count} passes"
    tokens = size * best.data.sequence_length
    return TrainOffer(
        f"micro-batch-{size}", f"micro-batch of {size}", config,
        f"{passes} of {tokens:,} tokens a step",
    )  # fmt: skip


def graphs(context: TrainContext, best: TrainConfig) -> TrainOffer | str:
    problem = graphs_problem(best, context.model, context.device)
    if problem is not None:
        return problem
    if best.graphs:
        return "it is on"
    return TrainOffer(
        "graphs", "passes as CUDA graphs", replace(best, graphs=True),
        "one launch instead of one for each kernel",
    )  # fmt: skip


def compiled(context: TrainContext, best: TrainConfig) -> TrainOffer | str:
    if best.compile:
        return "it is on"
    return TrainOffer(
        "compile", "norms and activations by torch.compile", replace(best, compile=True),
        "passes between products as torch fuses them",
    )  # fmt: skip


def fp8(context: TrainContext, best: TrainConfig) -> TrainOffer | str:
    return _fp8(context, best, "fp8", "products in fp8, a scale for each tensor")


def fp8_rows(context: TrainContext, best: TrainConfig) -> TrainOffer | str:
    return _fp8(context, best, "fp8-row", "products in fp8, a scale for each row")


def fp8_half(context: TrainContext, best: TrainConfig) -> TrainOffer | str:
    title = "products in fp8, weights' gradients in bf16"
    return _fp8(context, best, "fp8", title, fp8_weight_gradients="bf16")


def _fp8(
    context: TrainContext, best: TrainConfig, precision: str, title: str, **more: str
) -> TrainOffer | str:
    if context.ordered.precision != "auto":
        return f"--precision {context.ordered.precision} is given"
    if not has_fp8(context.device):
        name = "a CPU" if context.device == "cpu" else "this GPU"
        return f"{name} has no products in fp8 (NVIDIA from sm_89 on has)"
    if best.qat.is_given:
        return "--qat and --sparsity need products in bf16"
    changes: dict[str, Any] = {"precision": precision, "fp8_weight_gradients": "fp8", **more}
    config = replace(best, **changes)
    if config == best:
        return "it is on"
    if not context.fits(config):
        return "the codes do not fit into memory"
    name = precision if not more else f"{precision}-bf16-gradients"
    return TrainOffer(name, title, config, "twice the matrix rate of bf16", alters=True)


RUNGS = (
    TrainRung("bf16", "tensor cores", "compute in bf16", bf16),
    TrainRung("recomputation", "batch and memory", "less recomputation", less_recomputation),
    TrainRung("larger", "batch and memory", "larger micro-batch", larger_micro_batch),
    TrainRung("smaller", "batch and memory", "smaller micro-batch", smaller_micro_batch),
    TrainRung("graphs", "overhead", "passes as CUDA graphs", graphs),
    TrainRung("compile", "fuse", "norms and activations by torch.compile", compiled),
    TrainRung("fp8", "quantize", "products in fp8, a scale for each tensor", fp8),
    TrainRung("fp8-row", "quantize", "products in fp8, a scale for each row", fp8_rows),
    TrainRung(
        "fp8-bf16-gradients", "quantize", "products in fp8, weights' gradients in bf16", fp8_half
    ),
)


def combinations(context: TrainContext) -> Iterator[TrainConfig]:
    """Configs that a first guess is taken from: everything that alters nothing that is learned and
    fits. What is compiled is left to the search, since nothing predicts it.
    """
    base, ordered = context.defaults, context.ordered
    levels = LEVELS if ordered.recomputation == "auto" else (base.recomputation,)
    sizes = [base.batch.micro] if ordered.batch.micro is not None else divisors(base.batch.size)
    can_capture = graphs_problem(base, context.model, context.device) is None
    for level in levels:
        for size in sizes:
            assert size is not None, "nothing is open"
            recomputation: Recomputation = level  # type: ignore[assignment]
            config = with_micro(replace(base, recomputation=recomputation), size)
            if context.fits(config):
                yield config
                if can_capture and not base.graphs:
                    yield replace(config, graphs=True)
