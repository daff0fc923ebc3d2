"""What a training step holds at its peak: the tensors of step.py that are alive at once, beside the
weights and what the optimizer keeps.

A step is walked moment by moment: the loss with all activations kept, the backward pass through the
last layer, its end with every gradient there, the optimizer. On a GPU an op allocates its results
and little else; on a CPU the plain ops also write out in fp32 what they compute on the way.

    moment = peak(StepSize(config, "bf16", "none", num_tokens=32768, num_passes=1, longest=4096))
    moment.name, moment.num_bytes

Letters: T tokens of a pass, D hidden size, F MLP size, V vocabulary; Q and C are the columns of all
queries, and of queries, keys and values together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from ridgeline.kernels.adamw.reference import PIECE
from ridgeline.kernels.linear_cross_entropy.chunks import chunk_rows
from ridgeline.models import LayerConfig, ModelConfig
from ridgeline.models.cost import angle_bytes, layer_matrices, num_parameters
from ridgeline.models.training_cost import (
    KeptForm,
    activation_bytes,
    attention_bytes,
    layer_bytes,
    mlp_bytes,
)
from ridgeline.training.stepping.distillation import CHUNK_LOGITS

FP32, INT64 = 4, 8
BATCH_BYTES = 3 * 8  # of a token: its id, target and position
# On a CPU, by the dtype of the moments: fp32 numbers of each weight of a piece that are written out
# one by one. The compiled pass writes none, where it was built.
UPDATE_NUMBERS = {"fp32": 8.25, "bf16": 16, "8-bit": 20.25}
LOGIT_BYTES = 8 * FP32  # of each logit of a teacher's divergence, beside the logit itself
BATCHES_HELD = 6  # of micro-batches: the loader's, the one under way and the next


class StepMoment(NamedTuple):
    """Bytes, by what they are for."""

    name: str  # what the step is doing
    activations: int  # kept for the backward pass
    gradients: int
    loss: int  # logits of a chunk, the head's gradient in fp32
    working: int  # tensors of the pass that is under way

    @property
    def num_bytes(self) -> int:
        return self.activations + self.gradients + self.loss + self.working


@dataclass(frozen=True)
class AdapterSize:
    """What is learned beside a frozen model."""

    num_parameters: int
    kept: Mapping[str, int]  # by projection of a layer that has one: elements a token


@dataclass(frozen=True)
class StepSize:
    config: ModelConfig
    dtype: torch.dtype  # of the model's weights and activations
    recomputation: str
    num_tokens: int  # of one pass
    num_passes: int
    longest: int  # tokens of the longest document
    on_gpu: bool = True
    fp8: bool = False  # products of layers
    keeps_codes: bool = True  # with fp8, for weights' gradients; else their inputs are made again
    product_dtype: torch.dtype | None = None  # in which a CPU multiplies, where it is another
    moments: str = "fp32"
    adapters: AdapterSize | None = None  # these alone are learned
    decoding: int = 0  # bytes of a frozen matrix of codes on its way to a product
    rounding: int = 0  # bytes of a weight on its way to its rounded form
    teacher: ModelConfig | None = None
    learns_text: bool = True  # beside a teacher's probabilities
    num_held: int | None = None  # parameters of one of several ranks; None: all of the model's
    in_flight: int = 1  # passes whose activations are held at once
    stream_share: int = 1  # ranks that share the residual stream by tokens
    sums_always: bool = False  # gradients of a single pass too are sums in fp32
    context: int = 1  # ranks that share each sequence by tokens
    expert_room: float = 0.0  # rows of experts on several ranks, of those of even shares
    has_table: bool = True  # the embeddings are on this device of a pipeline
    has_head: bool = True  # and so are the last norm, the head and the loss
    is_head_cut: bool = False  # ranks have parts of the vocabulary: the loss overwrites its logits

    @property
    def element(self) -> int:
        return self.dtype.itemsize

    @property
    def form(self) -> KeptForm:
        if self.adapters is not None:  # which keep their inputs as they are
            return KeptForm(self.element, self.recomputation, adapters=self.adapters.kept)
        if self.fp8 and not self.keeps_codes:
            level = "elementwise" if self.recomputation == "none" else self.recomputation
            return KeptForm(self.element, level, stream_share=self.stream_share)
        return KeptForm(self.element, self.recomputation, self.fp8, stream_share=self.stream_share)

    @property
    def is_cast(self) -> bool:
        """Whether operands of products are copied to another dtype first."""
        return self.product_dtype not in (None, self.dtype)

    @property
    def stream(self) -> int:
        """Bytes of a token's residual stream on this rank."""
        return self.element * -(-self.config.hidden_size // self.stream_share)

    @property
    def head(self) -> int:
        """Elements of the head, or of the table of embeddings."""
        return self.config.vocab_size * self.config.hidden_size

    @property
    def num_learned(self) -> int:
        if self.adapters is not None:
            return self.adapters.num_parameters
        return num_parameters(self.config) if self.num_held is None else self.num_held

    @property
    def has_sums(self) -> bool:
        return self.num_passes > 1 or self.sums_always

    @property
    def sums(self) -> int:
        """Bytes of gradients that are summed in fp32, as those of several passes are."""
        return FP32 * self.num_learned if self.has_sums else 0

    @property
    def gradients(self) -> int:
        """All there are at a step's end."""
        return self.sums or self.element * self.num_learned

    @property
    def batches(self) -> int:
        return BATCHES_HELD * BATCH_BYTES * self.num_tokens


def peak(size: StepSize) -> StepMoment:
    """The moment that holds most."""
    return max(moments(size), key=lambda moment: moment.num_bytes)


def moments(size: StepSize) -> Iterator[StepMoment]:
    kept = activation_bytes(size.config, size.num_tokens, size.form)
    if size.form.keeps_attention:
        kept += size.config.num_layers * size.num_tokens * _host_attention(size)
    if size.recomputation != "blocks":
        kept += sum(_host_experts(size, layer) for layer in size.config.layers)
    kept += sum(_of_other_ranks(size, layer) for layer in size.config.layers)
    kept *= size.in_flight
    if size.rounding:
        yield StepMoment("rounding", kept, size.sums, 0, size.rounding)
    if size.teacher is not None:
        yield from _divergence(size, size.teacher, kept)
    if size.has_head and (size.teacher is None or size.learns_text):
        yield from _loss(size, kept + _divergence_gradients(size))
    rows = 2 * size.num_tokens * size.stream  # the last norm's, consumed
    for layer in set(size.config.layers):
        working = _backward(size, layer) + size.decoding
        if size.adapters is not None:
            yield StepMoment("backward", kept - rows, size.gradients, 0, working)
            continue
        gradient = size.has_head * size.head * size.element + _largest_gradient(size, layer)
        yield StepMoment("backward", kept - rows, size.sums + gradient, 0, working)
    if size.adapters is None:
        yield _first_layer(size)
        if size.has_table:
            yield _embeddings(size)
    update = 0 if size.on_gpu else int(UPDATE_NUMBERS[size.moments] * FP32 * PIECE)
    yield StepMoment("optimizer", 0, size.gradients, 0, update)


def _divergence(size: StepSize, teacher: ModelConfig, kept: int) -> Iterator[StepMoment]:
    """The teacher's forward pass, then logits of both models for some rows, with gradients."""
    D, F, element = teacher.hidden_size, _widest_mlp(teacher), size.element
    attention = 2 * (teacher.q_size + 2 * teacher.kv_size) + teacher.q_size
    inside = element * (3 * D + max(3 * F, attention))
    if not size.on_gpu:
        inside += 3 * FP32 * F
    yield StepMoment("the teacher's pass", kept, size.sums, 0, size.num_tokens * inside)
    V = size.config.vocab_size
    rows = min(size.num_tokens, max(1, CHUNK_LOGITS // V))
    logits = rows * V * (LOGIT_BYTES + (0 if element == FP32 else 1))
    if size.adapters is None:
        logits += (FP32 + element) * size.head  # their sum, and those of a chunk
    wanted = size.num_tokens * (D + size.config.hidden_size) * element
    yield StepMoment("divergence", kept, size.sums, logits, wanted)


def _divergence_gradients(size: StepSize) -> int:
    """Held beside the loss of the text."""
    if size.teacher is None:
        return 0
    head = 0 if size.adapters is not None else size.head
    return size.element * (head + size.num_tokens * size.config.hidden_size)


def _widest_mlp(config: ModelConfig) -> int:
    """Columns that a token has in one."""
    return max(
        config.mlp_size
        if layer.experts is None
        else layer.experts.experts_per_token * layer.experts.mlp_size
        for layer in config.layers
    )


def _loss(size: StepSize, kept: int) -> Iterator[StepMoment]:
    """The head's product, chunk by chunk, with its gradients; then these as autograd wants them."""
    config, T = size.config, size.num_tokens
    device = torch.device("cuda" if size.on_gpu else "cpu")
    dtype = size.product_dtype or size.dtype
    rows = min(T, chunk_rows(config.vocab_size, dtype, device))
    logits = rows * config.vocab_size * dtype.itemsize
    in_fp32 = FP32 * size.head if size.adapters is None else 0
    if not size.on_gpu:
        copies = 3 if config.final_softcap is None else 5  # values, their gradient on its way
        if size.is_head_cut:
            copies = int(size.element != FP32) + 2 * (config.final_softcap is not None)
        logits += copies * rows * config.vocab_size * FP32
    if size.is_cast:
        logits += dtype.itemsize * (size.head + rows * config.hidden_size)
    normed = T * (config.hidden_size * size.element + FP32)
    yield StepMoment("loss", kept, size.sums, logits + in_fp32, normed)
    if size.adapters is not None:
        return
    rounded = 0 if size.element == FP32 else size.element * size.head
    yield StepMoment("head's gradient", kept, size.sums, in_fp32 + rounded, 0)


def _first_layer(size: StepSize) -> StepMoment:
    """Where the backward pass comes to last: its activations alone, and all other gradients."""
    config, layer = size.config, size.config.layers[0]
    own = angle_bytes(config)
    if size.recomputation != "blocks":  # whose input is part of what it makes again
        own += layer_bytes(config, layer, size.form)
    if size.form.keeps_attention:
        own += _host_attention(size)
    apart = _of_other_ranks(size, layer)
    if size.recomputation != "blocks":
        apart += _host_experts(size, layer)
    gradients = size.sums
    if not size.has_sums:
        untied = 0 if config.tied_embeddings else size.head  # the table's own comes last
        others = size.num_learned - untied
        if size.num_held is None:
            others -= layer_matrices(config, layer)
        else:  # on one of several ranks parts of all are there
            others = max(0, others)
        gradients = size.element * others + _largest_gradient(size, layer)
    gradients += _unsummed(size)
    return StepMoment(
        "backward", size.num_tokens * own + apart, gradients, 0, _backward(size, layer)
    )


def _of_other_ranks(size: StepSize, layer: LayerConfig) -> int:
    """Bytes that a layer keeps of a pass because ranks share its work: with `context` the keys and
    values that this rank's queries see, in a front part and in one of the back of each sequence;
    with `expert` and a capacity rows beyond even shares, filled or not. Of even ones a rank keeps
    what one device does: its experts' rows, and what came back of those that it sent.
    """
    config, rows, tokens = size.config, 0.0, size.num_tokens
    if size.context > 1 and size.form.keeps_attention:
        visible = tokens * (size.context + 0.5)
        if layer.window is not None:
            sequences = -(-tokens * size.context // size.longest)
            visible = min(visible, tokens + 2 * sequences * (layer.window - 1))
        rows += visible * 2 * config.kv_size
    if layer.experts is not None and size.recomputation != "blocks" and size.expert_room:
        others = tokens * layer.experts.experts_per_token * (size.expert_room - 1.0)
        rows += others * (2 * config.hidden_size + 3 * layer.experts.mlp_size)
    return int(rows * size.element)


def _largest_gradient(size: StepSize, layer: LayerConfig) -> int:
    """Of the matrix whose gradient comes first; several passes add to sums at once."""
    if size.has_sums:
        return 0
    if layer.experts is not None:
        experts = layer.experts
        return size.element * 3 * experts.num_experts * experts.mlp_size * size.config.hidden_size
    return size.element * size.config.mlp_size * size.config.hidden_size


def _backward(size: StepSize, layer: LayerConfig) -> int:
    """Beyond what is kept, through the MLP or through attention, by when the MLP's is gone."""
    config, level = size.config, size.recomputation
    mlp = _mlp_work(size, layer)
    freed = mlp_bytes(config, layer, size.form)
    again = 0
    if level == "blocks":  # made again first, all of the layer
        whole = replace(size.form, recomputation="none")
        again = layer_bytes(config, layer, whole) + _host_attention(size)
        freed = mlp_bytes(config, layer, whole)
        mlp += again
    elif level == "attention":
        inner = replace(size.form, recomputation="elementwise")
        again = attention_bytes(config, inner) + _host_attention(size)
    attention = again + _attention_work(size) - freed
    experts = _host_experts(size, layer)
    if level == "blocks":  # they are made again with the rest
        return max(size.num_tokens * mlp + experts, size.num_tokens * attention) + _scores(size)
    return max(size.num_tokens * mlp, size.num_tokens * attention - experts) + _scores(size)


def _mlp_work(size: StepSize, layer: LayerConfig) -> int:
    """The stream's gradient, that of the activation's result and of its input. Bytes a token, as
    all below.
    """
    D, element = size.config.hidden_size, size.element
    streams = element * D * (1 + size.config.post_norms)
    if layer.experts is not None:
        experts = layer.experts
        if not size.on_gpu:  # one after the other, of which one may have every token
            return streams + FP32 * (2 * D + 4 * experts.mlp_size)
        return streams + element * experts.experts_per_token * (2 * D + 3 * experts.mlp_size)
    F = size.config.mlp_size
    activation = streams + element * 3 * F + 2 * D * size.fp8  # codes of the gradient, both ways
    if size.on_gpu:
        return activation
    copies = 0 if element == FP32 else 3 * FP32 * F  # gate, up and the gradient in fp32
    activation += copies + 3 * FP32 * F  # the sigmoid, the activated gate, the slope
    return max(activation, streams + _cast_work(size))


def _cast_work(size: StepSize) -> int:
    """On a CPU that multiplies in another dtype: gate-up's gradient with the operands and the
    result of its product, by when the activation's own tensors are gone.
    """
    if not size.is_cast:
        return 0
    F, D, element = size.config.mlp_size, size.config.hidden_size, size.element
    freed = (3 if size.recomputation in ("none", "blocks") else 2) * F
    weight = -(-2 * F * D // size.num_tokens)
    return element * (2 * F - freed) + FP32 * (2 * F + 2 * D + weight)


def _attention_work(size: StepSize) -> int:
    """The stream's gradient, the output's, those of q, k and v and of qkv's product; a GPU's
    kernels sum the queries' in fp32.
    """
    config, element = size.config, size.element
    C = config.q_size + 2 * config.kv_size
    own = config.hidden_size + config.q_size + 2 * C
    if config.qk_norm:
        own += config.q_size + config.kv_size
    return element * own + FP32 * config.q_size


def _scores(size: StepSize) -> int:
    """Of one document, with their gradients, which a CPU writes out where they have a soft-cap."""
    if size.on_gpu or size.config.attention_softcap is None:
        return 0
    return 4 * FP32 * size.config.num_heads * size.longest**2


def _host_attention(size: StepSize) -> int:
    """Bytes a token that attention keeps on a CPU beyond a GPU's: its result for each document
    apart, and where products are in another dtype, queries, keys and values in that.
    """
    if size.on_gpu:
        return 0
    config = size.config
    apart = config.q_size * (size.product_dtype or size.dtype).itemsize
    if config.attention_softcap is not None:  # scores twice in fp32, and which of them are hidden
        apart += (2 * FP32 * config.num_heads + config.num_heads // 2) * size.longest
    if not size.is_cast:
        return apart
    return apart + (FP32 - size.element) * (config.q_size + 2 * config.kv_size)


def _unsummed(size: StepSize) -> int:
    """Experts' gradients of a pass, which autograd leaves beside the sums. On several ranks those
    of a layer are added when it is done.
    """
    if not size.has_sums or size.num_held is not None:
        return 0
    experts = [layer.experts for layer in size.config.layers if layer.experts is not None]
    per_layer = (3 * each.num_experts * each.mlp_size for each in experts)
    return size.element * size.config.hidden_size * sum(per_layer)


def _host_experts(size: StepSize, layer: LayerConfig) -> int:
    """Bytes that a layer of experts keeps of a pass on a CPU beyond a GPU's: autograd goes through
    kernels/moe/reference.py, in fp32, and through the norm in front of it.
    """
    experts = layer.experts
    if size.on_gpu or experts is None:
        return 0
    D, F, element = size.config.hidden_size, experts.mlp_size, size.element
    operand = FP32 if size.is_cast else element
    # What both products take; gate, up and the activated gate; what comes out; two numbers.
    way = operand * (D + F) + FP32 * (3 * F + D) + 2 * INT64
    row = experts.experts_per_token * (way - element * (2 * D + 3 * F))
    row += experts.num_experts * (FP32 + INT64 - element)  # shares, and in which order they are
    row += (operand - element) * D  # what the router takes
    if not size.expert_room and size.stream_share == 1:
        row += FP32 * D * (1 if element == FP32 else 2)  # inside the norm
    copies = FP32 * experts.num_experts * (3 * F + 1) * D if size.is_cast else 0
    return size.num_tokens * row + copies


def _embeddings(size: StepSize) -> StepMoment:
    """The end of the backward pass, where every gradient is there, the table's own too."""
    config = size.config
    tables = int(config.tied_embeddings)  # the head's waits for the embedding's
    if size.has_sums:
        tables += 1
    rows = 2 * size.num_tokens * config.hidden_size * size.element
    gradients = size.gradients + size.element * size.head * tables + _unsummed(size)
    return StepMoment("embeddings", rows, gradients, 0, 0)
