"""How many kernels a step launches, and what launching them takes the host, by who launches: an op
of torch, a kernel of ours behind its checks, or a product of few rows with all that is folded in.

What a kernel costs the host is several times what it costs the device to be started: at batch 1 a
step that is not a graph takes as long as its launches, whatever its bytes. Measured where it ran;
predicted from the same step's launches by the ratio of what stands here.

    sum(kernels_a_layer(state, work)), launch_s(state, work)
"""

from __future__ import annotations

from typing import NamedTuple

from ridgeline.engine.execution.graph_kinds import FEW_PROMPTS, is_full
from ridgeline.kernels.skinny_linear import MAX_ROWS
from ridgeline.models.cost import MeanStep
from ridgeline.profiling.predicting.run_state import RunState
from ridgeline.profiling.tracing.division import ATTENTION_OPS

LAUNCH_S = 7e-6  # of a kernel by torch, where `eager_launch` was not measured
# The host's seconds for a kernel beyond `eager_launch`: modules, checks, views, Triton's launcher.
# From decode steps of an 8B shape at batch 1 on an H200 (climbs, 2026-11-15 and 16; 7 µs a launch):
# 22 to 27 ms in the plain loop. The ratios weigh more than the times, for the host's speed went up
# and down: the engine in fp32 took 1.26 to 1.42 times less one day, 1.72 and 1.74 times the next;
# in bf16, with 5 kernels a layer instead of 8, 1.26 times more than that.
TORCH_S, OWN_S, PRODUCT_S = 23e-6, 103e-6, 141e-6
OF_A_STEP = 6  # before the first layer and behind the last: embedding, norm, head, sampling
# The ops, beside modules, that `LaunchCounts` and OF_A_STEP count.
LAYER_OPS = (*ATTENTION_OPS, "rotary", "rotary_pages")
STEP_OPS = ("step_start", "sampling", "keep_tokens")


class LaunchCounts(NamedTuple):
    """How many a layer launches."""

    products: int
    attention: int
    other: int


NAIVE = LaunchCounts(4, 12, 12)  # counted in the plain loop; norms are one kernel on a GPU
CPU_NAIVE = LaunchCounts(4, 12, 24)
FUSED, APART = (
    LaunchCounts(4, 1, 0),
    LaunchCounts(4, 1, 3),
)  # norms and activation in the products, or not
CPU_FUSED, CPU_REFERENCE = LaunchCounts(4, 1, 2), LaunchCounts(4, 14, 20)


def kernels_a_layer(state: RunState, work: MeanStep) -> LaunchCounts:
    if state.loop == "naive":
        return NAIVE if state.on_gpu else CPU_NAIVE
    if not state.on_gpu:
        return CPU_FUSED if state.is_fused else CPU_REFERENCE
    result = FUSED if folds(state, work.tokens) else APART
    has_prompts = work.tokens > work.rows
    return result._replace(other=result.other + has_prompts)  # rotary apart from attention


def folds(state: RunState, num_tokens: float) -> bool:
    """Whether products of so many rows have norm, activation and residual in them, which products
    by cuBLAS have not: of plain weights in bf16 alone (see models/transformer.py), and of codes.
    """
    in_codes = state.recipe.scheme is not None and state.recipe.dtype != "fp32"
    is_own = state.recipe.dtype == "bf16" or in_codes
    return state.is_fused and state.on_gpu and num_tokens <= MAX_ROWS and is_own


def is_replayed(state: RunState, work: MeanStep) -> bool:
    """Whether a step of this size is a graph: prompts are, if alone or beside a full batch."""
    limits = state.recipe.limits
    if not state.uses_graphs or work.tokens > limits.max_graph_batch:
        return False
    drafts = state.recipe.speculation.method != "none"  # tokens that are no prompts'
    alone = work.tokens <= work.rows or work.rows < FEW_PROMPTS or drafts
    return alone or is_full(work.rows, limits.max_batch or 0)


def launch_s(state: RunState, work: MeanStep) -> float:
    """The host's seconds for all launches of a step, one by one."""
    kernels, layers = kernels_a_layer(state, work), state.config.num_layers
    known = state.hardware.ceiling("eager_launch")
    each = known.value if known is not None else LAUNCH_S
    if state.loop == "naive":
        return (layers * sum(kernels) + OF_A_STEP) * (each + TORCH_S)
    product = each + (PRODUCT_S if folds(state, work.tokens) else TORCH_S)
    own = (kernels.attention + kernels.other) * (each + OWN_S)
    return layers * (kernels.products * product + own) + OF_A_STEP * (each + TORCH_S)
