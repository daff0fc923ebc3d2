"""What a step is expected to take by counted work, ceilings and what kernels reach: the parts that
gains.py compares before and after a change. No clock is read here.

    parts = modelled(state, work)
    parts.matrices_s, parts.num_kernels
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

from ridgeline.engine.layer_speed import known_speedup
from ridgeline.formats.dtypes import dtype_bytes, parse_dtype
from ridgeline.hardware import Hardware
from ridgeline.kernels.pages import holds_codes
from ridgeline.kernels.skinny_linear import MAX_ROWS
from ridgeline.models import ModelConfig
from ridgeline.models.cost import MeanStep, StepCost, mean_step_cost, num_parameters
from ridgeline.profiling.prediction import Loop
from ridgeline.profiling.reach import Reach, attention_reach, product_reach
from ridgeline.quantization.scheme import Scheme, parse_scheme
from ridgeline.quantization.sizes import Matrix, model_matrices, stored_bytes, weight_bytes
from ridgeline.recipe import Recipe

# Where a ceiling is not known. What is compared are ratios, in which most of it cancels.
USUAL_BANDWIDTH = {"gpu": 2e12, "cpu": 2e10}  # B/s
USUAL_MATRIX = {"gpu": 3e14, "cpu": 2e11}  # FLOP/s
LAUNCH_S = 7e-6  # of a kernel by torch, where `eager_launch` was not measured
PYTHON_S = 13e-6  # between two launches: modules, checks, views
NODE_GAP_S = 1e-6  # between two kernels that wait for each other, in a graph or in a full queue
# Between ops on a CPU: few of ours, each behind some Python, or many of torch's (tiny models on a
# Xeon, 2026-11-15: 5 and 1.5 µs on an almost quiet machine).
OP_S = {True: 6e-6, False: 2e-6}
# Of an element-wise kernel over few tokens, on a GPU and on a CPU.
SMALL_KERNEL_S = {True: 2e-6, False: 5e-6}
# Of the loop, for each step: the plain one waits for its token, the engine's own work is hidden
# behind the device where steps overlap (18 µs on the H200, 2026-11-15; 250 on a CPU).
HOST_S = {"naive": 50e-6, "apart": 250e-6, "overlapped": 20e-6}


class Kernels(NamedTuple):
    """How many a layer launches."""

    products: int
    attention: int
    other: int


NAIVE = Kernels(4, 12, 12)  # counted in the plain loop; norms are one kernel on a GPU
CPU_NAIVE = Kernels(4, 12, 24)
FUSED = Kernels(4, 1, 0)  # norm, activation and residual are in the products
MANY_ROWS = Kernels(4, 1, 4)
CPU_FUSED, CPU_REFERENCE = Kernels(4, 1, 2), Kernels(4, 14, 20)
OF_A_STEP = 6  # before the first layer and behind the last: embedding, norm, head, sampling
TRAFFIC = {"fused": 3.0, "many": 12.0, "plain": 40.0}  # elements a layer moves, in hidden sizes


@dataclass(frozen=True)
class State:
    """How a model is run."""

    config: ModelConfig
    recipe: Recipe
    loop: Loop
    hardware: Hardware
    bytes_per_weight: float
    bytes_per_kv: float

    @property
    def on_gpu(self) -> bool:
        return self.hardware.device_type != "cpu"

    @property
    def is_fused(self) -> bool:
        """Whether the engine's own kernels run: on a GPU it has no others."""
        return self.loop == "engine" and (self.on_gpu or self.recipe.kernels == "fused")

    @property
    def uses_graphs(self) -> bool:
        return self.loop == "engine" and self.on_gpu and bool(self.recipe.graphs)

    @property
    def bandwidth(self) -> float:
        read = self.hardware.ceiling("read_bandwidth") or self.hardware.ceiling("memory_bandwidth")
        return read.value if read is not None else USUAL_BANDWIDTH[self._kind]

    def matrix_rate(self, dtype: str) -> float:
        ceiling = self.hardware.ceiling(f"matrix_{dtype}")
        if ceiling is None and dtype in ("fp8", "int8"):  # multiplied as 16-bit numbers then
            return self.matrix_rate(self.recipe.dtype)
        return ceiling.value if ceiling is not None else USUAL_MATRIX[self._kind]

    @property
    def _kind(self) -> str:
        return "gpu" if self.on_gpu else "cpu"

    def cost(self, work: MeanStep) -> StepCost:
        sizes = {"weight_bytes": self.bytes_per_weight, "kv_bytes": self.bytes_per_kv}
        return mean_step_cost(self.config, work, **sizes)


class Parts(NamedTuple):
    """Seconds of a step."""

    matrices_s: float
    attention_s: float
    other_s: float
    launch_s: float  # the host takes to launch all of it
    gap_s: float  # between kernels however early they are launched
    host_s: float
    num_kernels: float


def modelled(state: State, work: MeanStep) -> Parts:
    kernels, layers = kernels_a_layer(state, work.tokens), state.config.num_layers
    count = layers * sum(kernels) + OF_A_STEP
    if state.on_gpu:
        launch_s = count * (_eager_launch_s(state.hardware) + PYTHON_S)
        launch_s = NODE_GAP_S if state.uses_graphs else launch_s
        gap_s = count * NODE_GAP_S
    else:
        launch_s, gap_s = 0.0, count * OP_S[state.is_fused]
    return Parts(
        _matrices_s(state, work),
        _attention_s(state, work),
        _other_s(state, work, layers * kernels.other + OF_A_STEP),
        launch_s,
        gap_s,
        HOST_S[_host_way(state)],
        count,
    )


def kernels_a_layer(state: State, num_tokens: float) -> Kernels:
    if state.loop == "naive":
        return NAIVE if state.on_gpu else CPU_NAIVE
    if not state.on_gpu:
        return CPU_FUSED if state.is_fused else CPU_REFERENCE
    few = num_tokens <= MAX_ROWS and state.recipe.dtype != "fp32"
    return FUSED if few else MANY_ROWS


def planned_bytes_per_weight(config: ModelConfig, recipe: Recipe) -> float:
    """Of the weights that a step reads, as quantization/sizes.py would store them."""
    dtype = parse_dtype(recipe.dtype)
    if recipe.scheme is None:
        return float(dtype_bytes(dtype))
    lookup = 0 if config.tied_embeddings else config.vocab_size * config.hidden_size
    held = weight_bytes(config, dtype, parse_scheme(recipe.scheme)) - lookup * dtype_bytes(dtype)
    return held / (num_parameters(config) - lookup)


def _matrices_s(state: State, work: MeanStep) -> float:
    """Products one by one, as what starts them weighs more for small ones."""
    scheme = None if state.recipe.scheme is None else parse_scheme(state.recipe.scheme)
    plain = state.bytes_per_weight / planned_bytes_per_weight(state.config, state.recipe)
    total = _product_s(state, _head(state.config), None, work.logit_rows)
    for matrix, count in Counter(model_matrices(state.config)).items():
        seconds = _product_s(state, matrix, None, work.tokens, scale=plain)
        if scheme is not None and scheme.fits(*matrix):
            by_codes = _by_codes_s(state, matrix, scheme, work.tokens, scale=plain)
            # What is slower as codes stays plain, unless the recipe says otherwise.
            seconds = by_codes if state.recipe.quantize_all else min(by_codes, seconds)
        total += count * seconds
    return total + _experts_s(state, work)


def _product_s(
    state: State, matrix: Matrix, scheme: Scheme | None, rows: float, scale: float = 1.0
) -> float:
    if not rows:
        return 0.0
    dtype = parse_dtype(state.recipe.dtype)
    num_weights = matrix.num_outputs * matrix.depth
    if scheme is None:
        num_bytes = num_weights * dtype_bytes(dtype)
    else:
        num_bytes = stored_bytes(scheme, matrix, dtype)
    name = None if scheme is None else scheme.name
    reach = product_reach(name, state.recipe.dtype, on_gpu=state.on_gpu, fused=state.is_fused)
    return _work_s(state, num_bytes * scale, 2.0 * rows * num_weights, reach, _units(state, scheme))


def _by_codes_s(state: State, matrix: Matrix, scheme: Scheme, rows: float, scale: float) -> float:
    """By what was once timed of it on this machine (engine/layer_speed.py), or by its bytes."""
    kernels = "fused" if state.on_gpu or state.is_fused else "reference"
    timed = known_speedup(
        state.hardware, scheme, parse_dtype(state.recipe.dtype), kernels, matrix, rows
    )
    if timed is None:
        return _product_s(state, matrix, scheme, rows, scale)
    return _product_s(state, matrix, None, rows, scale) / timed


def _units(state: State, scheme: Scheme | None) -> str:
    """What the matrix units multiply in."""
    return state.recipe.dtype if scheme is None or scheme.inputs == "16-bit" else scheme.inputs


def _work_s(state: State, num_bytes: float, flops: float, reach: Reach, dtype: str) -> float:
    memory_s = num_bytes / (reach.bandwidth * state.bandwidth)
    return max(memory_s, flops / (reach.matrix * state.matrix_rate(dtype))) + reach.fixed_s


def _experts_s(state: State, work: MeanStep) -> float:
    """What the step costs beyond its dense matrices: experts, which no scheme quantizes."""
    if all(layer.experts is None for layer in state.config.layers):
        return 0.0
    element = dtype_bytes(parse_dtype(state.recipe.dtype))
    cost = mean_step_cost(state.config, work, weight_bytes=element, kv_bytes=0.0)
    dense = sum(m.num_outputs * m.depth for m in model_matrices(state.config))
    head = _head(state.config)
    head_weights = head.num_outputs * head.depth
    num_bytes = max(0.0, cost.weight_bytes - (dense + head_weights) * element)
    flops = cost.matrix_flops - 2.0 * (work.tokens * dense + work.logit_rows * head_weights)
    dtype = state.recipe.dtype
    reach = product_reach(None, dtype, on_gpu=state.on_gpu, fused=state.is_fused)
    reach = reach._replace(fixed_s=reach.fixed_s * 2 * state.config.num_layers)
    return _work_s(state, num_bytes, max(0.0, flops), reach, dtype)


def _attention_s(state: State, work: MeanStep) -> float:
    cost, layers = state.cost(work), state.config.num_layers
    codes = holds_codes(parse_dtype(state.recipe.kv.dtype)) and state.loop == "engine"
    reach = attention_reach(on_gpu=state.on_gpu, fused=state.is_fused, codes=codes)
    reach = reach._replace(fixed_s=reach.fixed_s * layers)
    num_bytes = cost.kv_read_bytes + cost.kv_write_bytes
    dtype = state.recipe.dtype if state.is_fused else "fp32"  # the reference computes in fp32
    return _work_s(state, num_bytes, cost.attention_flops, reach, dtype)


def _other_s(state: State, work: MeanStep, num_kernels: float) -> float:
    """Element-wise work: what is moved, or what small kernels take at least."""
    few = state.on_gpu and kernels_a_layer(state, work.tokens) == FUSED
    kind = "plain" if not state.is_fused else "fused" if few else "many"
    element = dtype_bytes(parse_dtype(state.recipe.dtype))
    elements = work.tokens * TRAFFIC[kind] * state.config.hidden_size * state.config.num_layers
    moved_s = elements * element / (0.7 * state.bandwidth)
    return max(moved_s, num_kernels * SMALL_KERNEL_S[state.on_gpu])


def _head(config: ModelConfig) -> Matrix:
    return Matrix(config.vocab_size, config.hidden_size)


def _host_way(state: State) -> str:
    if state.loop == "naive":
        return "naive"
    return "overlapped" if state.recipe.overlap and state.on_gpu else "apart"


def _eager_launch_s(hardware: Hardware) -> float:
    known = hardware.ceiling("eager_launch")
    return known.value if known is not None else LAUNCH_S
