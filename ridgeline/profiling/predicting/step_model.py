"""What a step is expected to take by counted work, ceilings and what kernels reach: the parts that
gains.py compares before and after a change. No clock is read here.

    parts = modelled(state, work)
    parts.matrices_s, parts.num_kernels
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from ridgeline.engine.loading.layer_speed import known_times
from ridgeline.engine.loading.load_plan import COPIES_SHARE
from ridgeline.engine.memory.footprint import copied_bytes
from ridgeline.formats.dtypes import dtype_bytes, parse_dtype
from ridgeline.kernels.pages import holds_codes
from ridgeline.kernels.skinny_linear import MAX_ROWS
from ridgeline.models import ModelConfig
from ridgeline.models.cost import MeanStep, mean_step_cost, num_parameters
from ridgeline.profiling.predicting.launching import (
    OF_A_STEP,
    folds,
    is_replayed,
    kernels_a_layer,
    launch_s,
)
from ridgeline.profiling.predicting.reach import (
    DECODING,
    ROUNDING_INPUTS_S,
    Reach,
    attention_reach,
    link_reach,
    product_reach,
    untuned_share,
)
from ridgeline.profiling.predicting.run_state import RunState
from ridgeline.profiling.tracing.communication import link_bytes
from ridgeline.quantization.linear import COPIED_FROM
from ridgeline.quantization.scheme import Scheme, parse_scheme
from ridgeline.quantization.sizes import (
    MatrixSize,
    bytes_per_weight,
    head_matrix,
    model_matrices,
    stored_bytes,
)
from ridgeline.recipe import Recipe

NODE_GAP_S = 1e-6  # between two kernels that wait for each other, in a graph or in a full queue
# Between ops on a CPU: few of ours, each behind some Python, or many of torch's (tiny models on a
# Xeon, 2026-11-15: 5 and 1.5 µs on an almost quiet machine).
OP_S = {True: 6e-6, False: 2e-6}
# Of an element-wise kernel over few tokens, on a GPU and on a CPU.
SMALL_KERNEL_S = {True: 2e-6, False: 5e-6}
# Of the loop, for each step: the plain one waits for its token, the engine's own work is hidden
# behind the device where steps overlap (18 µs on the H200, 2026-11-15; 250 on a CPU).
HOST_S = {"naive": 50e-6, "apart": 250e-6, "overlapped": 20e-6}
TRAFFIC = {"fused": 3.0, "many": 12.0, "plain": 40.0}  # elements a layer moves, in hidden sizes


class StepParts(NamedTuple):
    """Seconds of a step."""

    matrices_s: float
    attention_s: float
    other_s: float
    launch_s: float  # the host takes to launch all of it
    gap_s: float  # between kernels however early they are launched
    host_s: float
    num_kernels: float
    communication_s: float = 0.0  # of ranks


def modelled(state: RunState, work: MeanStep) -> StepParts:
    kernels, layers = kernels_a_layer(state, work), state.config.num_layers
    count = layers * sum(kernels) + OF_A_STEP
    launching_s, gap_s = 0.0, count * OP_S[state.is_fused]
    if state.on_gpu:
        launching_s = NODE_GAP_S if is_replayed(state, work) else launch_s(state, work)
        gap_s = count * NODE_GAP_S
    return StepParts(
        _matrices_s(state, work),
        _attention_s(state, work),
        _other_s(state, work, layers * kernels.other + OF_A_STEP),
        launching_s,
        gap_s,
        HOST_S[_host_way(state)],
        count,
        _communication_s(state, work),
    )


def planned_bytes_per_weight(config: ModelConfig, recipe: Recipe) -> float:
    """Of the weights that a step reads, as quantization/sizes.py would store them."""
    if recipe.scheme is None and _head_scheme(recipe) is None:
        return float(dtype_bytes(parse_dtype(recipe.dtype)))
    return _planned_bytes(config, recipe.dtype, recipe.scheme, recipe.head)


@lru_cache(maxsize=64)
def _planned_bytes(
    config: ModelConfig, dtype_name: str, scheme_name: str | None, head_name: str
) -> float:
    """Kept: a simulation asks for it with each of its points."""
    head = None if head_name == "plain" else parse_scheme(head_name)
    scheme = None if scheme_name is None else parse_scheme(scheme_name)
    return bytes_per_weight(config, parse_dtype(dtype_name), scheme, head)


@lru_cache(maxsize=64)
def _matrices(config: ModelConfig) -> dict[MatrixSize, int]:
    return Counter(model_matrices(config))


def _head_scheme(recipe: Recipe) -> Scheme | None:
    return None if recipe.head == "plain" else parse_scheme(recipe.head)


def head_share(config: ModelConfig) -> float:
    """Of the weights that a step reads."""
    embedding = config.vocab_size * config.hidden_size
    return embedding / (num_parameters(config) - (0 if config.tied_embeddings else embedding))


def head_bytes(config: ModelConfig, recipe: Recipe) -> float:
    """That one of its weights takes."""
    dtype, scheme = parse_dtype(recipe.dtype), _head_scheme(recipe)
    if scheme is None:
        return float(dtype_bytes(dtype))
    matrix = head_matrix(config)
    return stored_bytes(scheme, matrix, dtype) / (matrix.num_outputs * matrix.depth)


def _matrices_s(state: RunState, work: MeanStep) -> float:
    """Products one by one, as what starts them weighs more for small ones."""
    scheme = None if state.recipe.scheme is None else parse_scheme(state.recipe.scheme)
    head, rows = head_matrix(state.config), work.logit_rows
    scale, head_scale = _byte_scales(state)
    total = _matrix_s(state, head, _head_scheme(state.recipe), rows, head_scale)
    for matrix, count in _matrices(state.config).items():
        total += count * _matrix_s(state, matrix, scheme, work.tokens, scale)
    return total + _experts_s(state, work)


def _byte_scales(state: RunState) -> tuple[float, float]:
    """What is read of matrices, and of the head, over what the recipe alone says."""
    blocks = state.own_blocks
    if blocks is None:
        planned = planned_bytes_per_weight(state.config, state.recipe)
        return state.bytes_per_weight / planned, 1.0
    share, element = head_share(state.config), dtype_bytes(parse_dtype(state.recipe.dtype))
    others = (blocks.mean - share * blocks.head) / (1.0 - share)
    return others / element, blocks.head / element


def _matrix_s(
    state: RunState, matrix: MatrixSize, scheme: Scheme | None, rows: float, scale: float
) -> float:
    plain_s = _product_s(state, matrix, None, rows, scale)
    if scheme is None or not scheme.fits(*matrix) or state.loop == "naive":
        return plain_s
    if state.on_gpu and scheme.inputs == "16-bit":
        by_numbers_s = _product_s(state, matrix, None, rows)
        if rows >= COPIED_FROM and holds_copies(state):
            return by_numbers_s
        if rows > MAX_ROWS:
            return by_numbers_s + _decoding_s(state, matrix, scheme)
    by_codes_s = _by_codes_s(state, matrix, scheme, rows, scale)
    # What is slower as codes stays plain, unless the recipe says otherwise.
    return by_codes_s if state.recipe.quantize_all else min(by_codes_s, plain_s)


def _product_s(
    state: RunState, matrix: MatrixSize, scheme: Scheme | None, rows: float, scale: float = 1.0
) -> float:
    if not rows:
        return 0.0
    way = _Arithmetic(state.recipe.dtype, state.is_fused)
    seconds = _by_ceilings_s(state, matrix, scheme, rows, way, scale)
    if state.on_gpu and scheme is not None and scheme.inputs != "16-bit" and rows > MAX_ROWS:
        seconds += ROUNDING_INPUTS_S
    is_thumb = folds(state, rows) and not state.recipe.tuned
    name = None if scheme is None else scheme.name
    seconds /= untuned_share(name) if is_thumb else 1.0
    return seconds if state.on_gpu else seconds * _timed_factor(state, matrix, rows)


class _Arithmetic(NamedTuple):
    """What products are made in."""

    dtype: str
    fused: bool  # by our kernels


def _by_ceilings_s(
    state: RunState,
    matrix: MatrixSize,
    scheme: Scheme | None,
    rows: float,
    way: _Arithmetic,
    scale: float = 1.0,
) -> float:
    dtype = parse_dtype(way.dtype)
    num_weights = matrix.num_outputs * matrix.depth
    if scheme is None:
        num_bytes = num_weights * dtype_bytes(dtype)
    else:
        num_bytes = stored_bytes(scheme, matrix, dtype)
    name = None if scheme is None else scheme.name
    reach = product_reach(name, way.dtype, on_gpu=state.on_gpu, fused=way.fused)
    flops = 2.0 * rows * num_weights
    units = _units(state, scheme) if way.dtype == state.recipe.dtype else way.dtype
    return _work_s(state, num_bytes * scale, flops, reach, units)


def _timed_factor(state: RunState, matrix: MatrixSize, rows: float) -> float:
    """What plain products of this shape took here, where any were timed, over what ceilings say: on
    a CPU that is up to the kernel, and other in each dtype. Where this dtype was not timed it is
    taken to be off by as much as another.
    """
    own = state.recipe.dtype
    for fused in dict.fromkeys((state.is_fused, True, False)):
        for dtype in dict.fromkeys((own, "fp32", "bf16", "fp16")):
            kernels = "fused" if fused else "reference"
            known = known_times(state.hardware, None, parse_dtype(dtype), kernels, matrix, rows)
            if known is not None:
                way = _Arithmetic(dtype, fused)
                return known.plain_s / _by_ceilings_s(state, matrix, None, known.rows, way)
    return 1.0


def _by_codes_s(
    state: RunState, matrix: MatrixSize, scheme: Scheme, rows: float, scale: float
) -> float:
    """By what was once timed of it on this machine (engine/loading/layer_speed.py), or by its
    bytes.
    """
    kernels = "fused" if state.on_gpu or state.is_fused else "reference"
    kernels += " untuned" if state.on_gpu and not state.recipe.tuned else ""
    timed = known_times(
        state.hardware, scheme, parse_dtype(state.recipe.dtype), kernels, matrix, rows
    )
    if timed is None or timed.quantized_s <= 0:
        return _product_s(state, matrix, scheme, rows, scale)
    return _product_s(state, matrix, None, rows, scale) / timed.speedup


def holds_copies(state: RunState) -> bool:
    """As the recipe says, or as an engine that has the device to itself would choose."""
    if state.recipe.copies is not None:
        return state.recipe.copies
    held = copied_bytes(state.config, replace(state.recipe, copies=True))
    return held <= COPIES_SHARE * state.hardware.memory_bytes


def _decoding_s(state: RunState, matrix: MatrixSize, scheme: Scheme) -> float:
    """A step of more tokens than our kernels take writes a matrix of codes in the dtype first."""
    dtype = parse_dtype(state.recipe.dtype)
    written = matrix.num_outputs * matrix.depth * dtype_bytes(dtype)
    return (stored_bytes(scheme, matrix, dtype) + written) / (DECODING * state.bandwidth)


def _units(state: RunState, scheme: Scheme | None) -> str:
    """What the matrix units multiply in."""
    plain = "tf32" if state.rounds_to_tf32 else state.recipe.dtype
    return plain if scheme is None or scheme.inputs == "16-bit" else scheme.inputs


def _work_s(state: RunState, num_bytes: float, flops: float, reach: Reach, dtype: str) -> float:
    memory_s = num_bytes / (reach.bandwidth * state.bandwidth)
    return max(memory_s, flops / (reach.matrix * state.matrix_rate(dtype))) + reach.fixed_s


def _experts_s(state: RunState, work: MeanStep) -> float:
    """What the step costs beyond its dense matrices: experts, which no scheme quantizes."""
    if all(layer.experts is None for layer in state.config.layers):
        return 0.0
    element = dtype_bytes(parse_dtype(state.recipe.dtype))
    cost = mean_step_cost(state.config, work, weight_bytes=element, kv_bytes=0.0)
    dense = sum(m.num_outputs * m.depth for m in model_matrices(state.config))
    head = head_matrix(state.config)
    head_weights = head.num_outputs * head.depth
    num_bytes = max(0.0, cost.weight_bytes - (dense + head_weights) * element)
    flops = cost.matrix_flops - 2.0 * (work.tokens * dense + work.logit_rows * head_weights)
    dtype = state.recipe.dtype
    reach = product_reach(None, dtype, on_gpu=state.on_gpu, fused=state.is_fused)
    reach = reach._replace(fixed_s=reach.fixed_s * 2 * state.config.num_layers)
    return _work_s(state, num_bytes, max(0.0, flops), reach, dtype)


def _attention_s(state: RunState, work: MeanStep) -> float:
    cost, layers = state.cost(work), state.config.num_layers
    codes = holds_codes(parse_dtype(state.recipe.kv.dtype)) and state.loop == "engine"
    reach = attention_reach(on_gpu=state.on_gpu, fused=state.is_fused, codes=codes)
    reach = reach._replace(fixed_s=reach.fixed_s * layers)
    num_bytes = cost.kv_read_bytes + cost.kv_write_bytes
    dtype = state.recipe.dtype if state.is_fused else "fp32"  # the reference computes in fp32
    return _work_s(state, num_bytes, cost.attention_flops, reach, dtype)


def _other_s(state: RunState, work: MeanStep, num_kernels: float) -> float:
    """Element-wise work: what is moved, or what small kernels take at least."""
    kind = "plain" if not state.is_fused else "fused" if folds(state, work.tokens) else "many"
    element = dtype_bytes(parse_dtype(state.recipe.dtype))
    elements = work.tokens * TRAFFIC[kind] * state.config.hidden_size * state.config.num_layers
    moved_s = elements * element / (0.7 * state.bandwidth)
    return max(moved_s, num_kernels * SMALL_KERNEL_S[state.on_gpu])


def _communication_s(state: RunState, work: MeanStep) -> float:
    """A sum behind the embedding and behind both halves of every layer, and the logits."""
    num_ranks, config = state.recipe.parallel.tensor, state.config
    if num_ranks == 1:
        return 0.0
    ceiling = state.hardware.ceiling("link_bandwidth")
    link = link_reach(None if ceiling is None else ceiling.value, on_gpu=state.on_gpu)
    element = dtype_bytes(parse_dtype(state.recipe.dtype))
    sums = 1 + 2 * config.num_layers
    summed = link_bytes("all_reduce", work.tokens * config.hidden_size * element, num_ranks)
    logits = link_bytes("all_gather", work.logit_rows * config.vocab_size * element, num_ranks)
    return (sums + 1) * link.fixed_s + (sums * summed + logits) / link.bytes_per_s


def _host_way(state: RunState) -> str:
    if state.loop == "naive":
        return "naive"
    return "overlapped" if state.overlaps else "apart"
