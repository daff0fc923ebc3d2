"""The work of a training step, op by op, as it is planned to run: FLOPs, bytes and launches of both
passes, of what is computed again, of the loss and the optimizer.

Counted from the shape and the memory plan's choices; nothing is loaded. A model's own FLOPs, which
MFU is made of, are models/training_cost.py's: here a step also has what it computes twice, and
what adapters, codes, roundings and teachers add.

    work = training_work(planned_step(model_config, train_config, "cuda", method, [4096] * 8))
    work[0].name, work[0].part, work[0].flops       # "attn.qkv", "products", 3.3e12

Letters: T tokens of a step, D hidden size, F MLP size, V vocabulary, O outputs of a projection.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from ridgeline.formats.dtypes import dtype_name
from ridgeline.kernels.linear_cross_entropy.chunks import chunk_rows
from ridgeline.models import ModelConfig
from ridgeline.models.cost import Chunk, num_expert_parameters, num_parameters, step_cost
from ridgeline.profiling.tracing.training_trace import AGAIN, BACKWARD, TrainingPart
from ridgeline.quantization.scheme import Scheme, parse_scheme
from ridgeline.quantization.sizes import MatrixSize, named_matrices, stored_bytes
from ridgeline.training.config import TrainConfig
from ridgeline.training.memory.methods import ROUNDING_BYTES, TrainingMethod
from ridgeline.training.memory.plan import ALL_WEIGHTS, MOMENT_BYTES, kind_of, step_size
from ridgeline.training.memory.step import FP32, StepSize
from ridgeline.training.methods.options import QatOptions
from ridgeline.training.stepping.distillation import CHUNK_LOGITS
from ridgeline.training.stepping.precision import PRECISIONS, PrecisionPlan

# Of each logit of a teacher's divergence: plain ops in fp32, forward and backward, counted in
# distillation.py and not measured.
DIVERGENCE_BYTES = 25 * FP32
# Kernels of a layer on a GPU, counted in fused.py: forward, backward, and made again.
LAYER_KERNELS = {"forward": 10, "backward": 19, "elementwise": 2, "attention": 6, "blocks": 10}
FP8_KERNELS, ADAPTER_KERNELS, CHUNK_KERNELS, STEP_KERNELS = 16, 40, 6, 40


class WorkOp(NamedTuple):
    name: str  # of all layers together: "attn.qkv", "attn.qkv backward"
    part: TrainingPart
    flops: float = 0.0
    num_bytes: float = 0.0
    units: str | None = None  # that multiply: "bf16"; None: bytes alone count


@dataclass(frozen=True)
class PlannedStep:
    """A step whose micro-batch and recomputation are chosen."""

    size: StepSize
    precision: PrecisionPlan
    documents: tuple[int, ...]  # tokens of each, over all passes, padding included
    codes: Mapping[str, Scheme] = field(default_factory=dict)  # of frozen projections
    qat: QatOptions = field(default_factory=QatOptions)
    deterministic: bool = False
    is_captured: bool = False  # passes are CUDA graphs

    @property
    def num_tokens(self) -> int:
        return self.size.num_tokens * self.size.num_passes

    @property
    def is_frozen(self) -> bool:
        return self.size.adapters is not None

    @property
    def units(self) -> str:
        """What products of the head, and of layers without fp8, are multiplied in."""
        if self.precision.uses_tf32:
            return "tf32"
        return dtype_name(self.size.product_dtype or self.size.dtype)

    @property
    def computes_again(self) -> tuple[bool, bool]:
        """Attention's half of a layer, and the other."""
        level = self.size.recomputation
        return level in ("attention", "blocks"), level == "blocks"

    @property
    def makes_values_again(self) -> bool:
        """Norms' and activations' results, for weights' gradients."""
        is_fp8 = self.size.fp8 and not self.is_frozen
        if is_fp8:
            return not self.size.keeps_codes
        return self.size.recomputation in ("elementwise", "attention")


def planned_step(
    model: ModelConfig,
    config: TrainConfig,
    device: str,
    documents: Sequence[int],
    method: TrainingMethod = ALL_WEIGHTS,
) -> PlannedStep:
    """`config` has nothing open (the memory plan's has not)."""
    precision = PRECISIONS[config.precision].with_moments(config.optimizer.moments)
    size = step_size(model, config, kind_of(device), method)
    return PlannedStep(
        size,
        precision,
        tuple(documents),
        method.codes,
        config.qat,
        config.deterministic,
        config.graphs,
    )


def training_work(step: PlannedStep) -> list[WorkOp]:
    """All of a step's, ops without work left out."""
    result = [*_products(step), *_attention(step), *_head(step), *_elementwise(step)]
    result += [*_additions(step), _optimizer(step), _casts(step)]
    return [op for op in result if op.flops or op.num_bytes]


def num_kernels(step: PlannedStep) -> float:
    """Launched in a step on a GPU; a CPU's ops are several times as many."""
    size, counts = step.size, LAYER_KERNELS
    each = counts["forward"] + counts["backward"] + counts.get(size.recomputation, 0)
    each += FP8_KERNELS * size.fp8 + ADAPTER_KERNELS * step.is_frozen
    vocab_size = size.config.vocab_size
    rows = chunk_rows(vocab_size, size.dtype, torch.device("cuda" if size.on_gpu else "cpu"))
    total = size.config.num_layers * each + CHUNK_KERNELS * -(-size.num_tokens // rows)
    if size.teacher is not None:
        chunks = -(-size.num_tokens // max(1, CHUNK_LOGITS // vocab_size))
        total += counts["forward"] * size.teacher.num_layers + 5 * CHUNK_KERNELS * chunks
    return size.num_passes * total + STEP_KERNELS


def _products(step: PlannedStep) -> Iterator[WorkOp]:
    """Of layers: forward, both gradients or the input's alone, and what is made again."""
    matrices = Counter(
        (name.split(".", 2)[2], matrix) for name, matrix in named_matrices(step.size.config)
    )
    units = "fp8" if step.size.fp8 else step.units
    of_weights = step.units if step.size.fp8 and not step.size.keeps_codes else units
    for (name, matrix), count in matrices.items():
        again = step.computes_again[not name.startswith("attn")]
        one = _product(step, matrix, count)
        yield WorkOp(name, "products", *one, units)
        yield WorkOp(name + BACKWARD, "products", *one, units)
        if not step.is_frozen:
            yield WorkOp(name + BACKWARD, "products", *one, of_weights)
        if again:
            yield WorkOp(name + AGAIN, "products", *one, units)
    yield from _experts(step)
    if step.size.num_passes > 1:  # products add to sums that they read and write
        moved = 2.0 * step.size.sums * step.size.num_passes
        yield WorkOp("sums of gradients", "products", 0.0, moved)


def _product(step: PlannedStep, matrix: MatrixSize, count: int = 1) -> tuple[float, float]:
    """FLOPs, and bytes of both operands and the result: a weight's in each pass."""
    weights = matrix.num_outputs * matrix.depth
    rows = step.num_tokens * (matrix.num_outputs + matrix.depth)
    moved = step.size.element * (rows + step.size.num_passes * weights)
    return 2.0 * step.num_tokens * weights * count, float(moved * count)


def _experts(step: PlannedStep) -> Iterator[WorkOp]:
    """Experts' own matrices, by the tokens that go through each."""
    config = step.size.config
    layers = [layer.experts for layer in config.layers if layer.experts is not None]
    if not layers:
        return
    active = sum(3 * each.experts_per_token * each.mlp_size * config.hidden_size for each in layers)
    weights = num_expert_parameters(config) * step.size.num_passes * step.size.element
    one = 2.0 * step.num_tokens * active, float(weights)
    yield WorkOp("mlp.experts", "products", *one, step.units)
    for _ in range(1 if step.is_frozen else 2):
        yield WorkOp("mlp.experts" + BACKWARD, "products", *one, step.units)
    if step.computes_again[1]:
        yield WorkOp("mlp.experts" + AGAIN, "products", *one, step.units)


def _attention(step: PlannedStep) -> Iterator[WorkOp]:
    """What a causal kernel has to compute: the pairs that may see each other."""
    config, T = step.size.config, step.num_tokens
    flops = _pair_flops(config, step.documents)
    heads = config.q_size + config.kv_size
    moved = 2.0 * T * heads * step.size.element * config.num_layers
    yield WorkOp("attention", "attention", flops, moved, step.units)
    yield WorkOp("attention" + BACKWARD, "attention", 2 * flops, 2 * moved, step.units)
    if step.computes_again[0]:
        yield WorkOp("attention" + AGAIN, "attention", flops, moved, step.units)


def _pair_flops(config: ModelConfig, documents: Sequence[int]) -> float:
    chunks = [Chunk(length, 0) for length in documents if length]
    return step_cost(config, chunks, weight_bytes=0, kv_bytes=0, logit_rows=0).attention_flops


def _head(step: PlannedStep) -> Iterator[WorkOp]:
    """The head's products, and the passes over its logits, of all tokens: none is left out of a
    chunk for having no target.
    """
    size, config = step.size, step.size.config
    one = _product(step, MatrixSize(config.vocab_size, config.hidden_size))
    logits = float(step.num_tokens * config.vocab_size)
    losses = [size.teacher is None or size.learns_text, size.teacher is not None]
    for _ in range(sum(losses)):
        yield WorkOp("head", "products", *one, step.units)
        for _ in range(1 if step.is_frozen else 2):
            yield WorkOp("head" + BACKWARD, "products", *one, step.units)
    if losses[0]:  # read for the sum and for the gradient, which is written in their place
        yield WorkOp("loss", "loss", 0.0, 3 * logits * size.element)
    if losses[1]:
        yield WorkOp("divergence", "loss", 0.0, DIVERGENCE_BYTES * logits)


def _elementwise(step: PlannedStep) -> Iterator[WorkOp]:
    """Each tensor read and written once by its pass, as a GPU's kernels do."""
    config, T = step.size.config, step.num_tokens
    layers, D, heads = config.num_layers, config.hidden_size, config.q_size + config.kv_size
    F = sum(_mlp_columns(config)) / layers
    moved = T * layers * step.size.element  # for each element of a layer
    norms = 8 * D + 4 * D * config.post_norms + 2 * heads * config.qk_norm
    turns = 2 * heads

    def op(name: str, elements: float) -> WorkOp:
        return WorkOp(name, "element-wise", 0.0, moved * elements)

    yield op("norms", norms + 4 * D / layers)
    yield op("norms" + BACKWARD, norms + 4 * D / layers)
    yield op("activation", 3 * F)
    yield op("activation" + BACKWARD, 5 * F)
    yield op("rotary", turns)
    yield op("rotary" + BACKWARD, turns + 2 * config.kv_size)
    attention, mlp = step.computes_again
    if attention:
        yield op("norms" + AGAIN, norms / 2 * (1 + mlp))
        yield op("rotary" + AGAIN, turns)
    if mlp:
        yield op("activation" + AGAIN, 3 * F)
    if step.makes_values_again:
        yield op("norms" + AGAIN, 4 * D)
        yield op("activation" + AGAIN, 3 * F if step.size.fp8 else F)  # a pass, or part of one
    yield from _tables(step)


def _mlp_columns(config: ModelConfig) -> Iterator[int]:
    """That a token has in each layer's MLP."""
    for layer in config.layers:
        experts = layer.experts
        yield config.mlp_size if experts is None else experts.experts_per_token * experts.mlp_size


def _tables(step: PlannedStep) -> Iterator[WorkOp]:
    """Rows of the table of embeddings, and where it is learned its gradient; the head's gradient
    from fp32 to its dtype, and where both are one table their sum.
    """
    size, config = step.size, step.size.config
    rows, table = step.num_tokens * config.hidden_size * size.element, size.head
    passes = 0 if step.is_frozen else size.num_passes
    learned = (2.0 * rows if passes else 0.0) + passes * table * size.element
    yield WorkOp("embedding", "element-wise", 0.0, 2.0 * rows + learned)
    each = 2 * FP32 + size.element * (1 + 3 * config.tied_embeddings)
    yield WorkOp("others", "element-wise", 0.0, float(passes * table * each))


def _additions(step: PlannedStep) -> Iterator[WorkOp]:
    """What methods and fp8 add."""
    size = step.size
    if size.fp8:
        yield WorkOp("fp8 codes", "element-wise", 0.0, _code_bytes(step))
    if size.adapters is not None:
        yield _adapters(step)
    if step.codes and size.on_gpu:
        yield WorkOp("decoding", "element-wise", 0.0, _decoded_bytes(step))
    if step.qat.is_given:
        weights = sum(m.num_outputs * m.depth for _, m in named_matrices(size.config))
        scheme = None if step.qat.scheme is None else parse_scheme(step.qat.scheme)
        kind = "symmetric" if scheme is None or scheme.symmetric else "asymmetric"
        yield WorkOp("rounding", "element-wise", 0.0, 2 * ROUNDING_BYTES[kind] * weights)
    if size.teacher is not None:
        yield from _teacher(step, size.teacher)


def _code_bytes(step: PlannedStep) -> float:
    """Values in 16 bits read, codes written both ways round: of each gradient and of what stands
    alone in front of a product; of weights once a step, of frozen ones never again.
    """
    config, size = step.size.config, step.size
    moved = size.element + 2
    gradients = sum(matrix.num_outputs for _, matrix in named_matrices(config))
    inputs = config.q_size * config.num_layers
    if step.is_frozen:  # whose norms and activations are apart
        inputs = sum(matrix.depth for _, matrix in named_matrices(config))
    weights = 0 if step.is_frozen else sum(m[0] * m[1] for _, m in named_matrices(config))
    return float(moved * (step.num_tokens * (gradients + inputs) + weights))


def _adapters(step: PlannedStep) -> WorkOp:
    """Thin products beside each projection: what they read and write is wider than they are."""
    size = step.size
    assert size.adapters is not None
    widths = 0
    for name, matrix in named_matrices(size.config):
        if name.rpartition(".")[2] in size.adapters.kept:
            widths += 4 * matrix.depth + 4 * matrix.num_outputs
    flops = 6.0 * step.num_tokens * size.adapters.num_parameters
    moved = float(step.num_tokens * widths * size.element)
    return WorkOp("adapters", "products", flops, moved, step.units)


def _decoded_bytes(step: PlannedStep) -> float:
    """Codes read and weights written, for a product, for its gradient, and where it is made
    again.
    """
    dtype, moved = step.size.dtype, 0.0
    for name, matrix in named_matrices(step.size.config):
        if name in step.codes:
            times = 2 + step.computes_again["mlp" in name]
            plain = matrix.num_outputs * matrix.depth * dtype.itemsize
            moved += times * (stored_bytes(step.codes[name], matrix, dtype) + plain)
    return moved * step.size.num_passes


def _teacher(step: PlannedStep, teacher: ModelConfig) -> Iterator[WorkOp]:
    """Its forward pass."""
    chunks = [Chunk(length, 0) for length in step.documents if length]
    cost = step_cost(
        teacher, chunks, weight_bytes=step.size.element, kv_bytes=0, logit_rows=step.num_tokens
    )
    yield WorkOp(
        "teacher", "products", cost.matrix_flops, cost.weight_bytes * step.size.num_passes,
        step.units,
    )  # fmt: skip
    yield WorkOp("teacher attention", "attention", cost.attention_flops, 0.0, step.units)
    widths = 8 * teacher.hidden_size + 2 * (teacher.q_size + teacher.kv_size)
    elements = teacher.num_layers * widths + 3 * sum(_mlp_columns(teacher))
    moved = float(step.num_tokens * elements * step.size.element)
    yield WorkOp("teacher norms", "element-wise", 0.0, moved)


def _optimizer(step: PlannedStep) -> WorkOp:
    """The gradients' norm, then one pass over weights, what is kept beside them, and gradients."""
    format, size = step.precision.format, step.size
    gradient = FP32 if size.num_passes > 1 else size.element
    weight = 2 if format.weight == "bf16" else 4
    moved = 2 * gradient + 2 * (weight + MOMENT_BYTES[format.moments])
    if step.precision.has_copies:
        moved += FP32 + size.element
    count = size.num_learned if step.is_frozen else num_parameters(size.config)
    return WorkOp("optimizer", "optimizer", 0.0, moved * count)


def _casts(step: PlannedStep) -> WorkOp:
    """On a CPU that multiplies in another dtype: operands there, results back."""
    size = step.size
    if not size.is_cast:
        return WorkOp("casts", "copies")
    products = [op for op in [*_products(step), *_head(step)] if op.units is not None]
    moved = sum(op.num_bytes for op in products) / size.element * (size.element + FP32)
    return WorkOp("casts", "copies", 0.0, moved)
