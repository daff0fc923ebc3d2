"""What training a model costs, from its config alone: the FLOPs that a batch's loss and gradients
need, and what a forward pass keeps for the backward one.

The one owner of these figures: the memory plan, MFU and predictions read them. FLOPs are the
model's, not the machine's: what is computed a second time to save memory, what is padded, and
tokens that no loss depends on are not counted.

    flops = training_flops(config, documents=[4096] * 8, num_targets=8 * 4095)
    flops.total / (step_s * peak)           # MFU
    activation_bytes(config, 4096, KeptForm(2, "elementwise"))
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ridgeline.models.config import LayerConfig, ModelConfig
from ridgeline.models.cost import Chunk, angle_bytes, step_cost

PASSES = 3  # forward, and backward for both factors of each product
FROZEN_PASSES = 2  # of weights that are not learned
ID_BYTES = 8
# What is computed again in the backward pass instead of being kept, from nothing to everything.
LEVELS = ("none", "elementwise", "attention", "blocks")


@dataclass(frozen=True)
class TrainingFlops:
    """Of loss and gradients of a batch."""

    layers: float  # products with the layers' weights
    head: float
    attention: float

    @property
    def total(self) -> float:
        return self.layers + self.head + self.attention

    def __add__(self, other: TrainingFlops) -> TrainingFlops:
        return TrainingFlops(
            self.layers + other.layers, self.head + other.head, self.attention + other.attention
        )


def training_flops(
    config: ModelConfig, documents: Sequence[int], num_targets: int, passes: int = PASSES
) -> TrainingFlops:
    """Of documents with so many tokens each, of which `num_targets` have a target. A token sees
    those before it in its document, as far as a layer's window goes; tokens without a target go
    through no head. `passes` are those over the weights: attention has no weights, and all three
    unless there is no backward pass.
    """
    chunks = [Chunk(length, 0) for length in documents if length]
    layers = step_cost(config, chunks, weight_bytes=0, kv_bytes=0, logit_rows=0)
    head = 2.0 * num_targets * config.vocab_size * config.hidden_size
    attention = layers.attention_flops * (PASSES if passes > 1 else 1)
    return TrainingFlops(passes * layers.matrix_flops, passes * head, attention)


@dataclass(frozen=True)
class KeptForm:
    """How a forward pass keeps what the backward pass needs."""

    element_bytes: int
    recomputation: str = "none"
    fp8: bool = False  # products keep their inputs as codes of one byte, whatever is recomputed
    # Elements a token that an adapter keeps beside a frozen projection (qkv, out, gate_up, down);
    # a frozen one without an adapter keeps nothing. None: the projections are learned themselves.
    adapters: Mapping[str, int] | None = None
    # Ranks that share the residual stream by tokens; a norm's result is whole on each unless it is
    # gathered again for the backward pass.
    stream_share: int = 1
    gathers_again: bool = False

    def __post_init__(self) -> None:
        assert self.recomputation in LEVELS, self.recomputation

    @property
    def result_bytes(self) -> int:
        """Of an element that a norm or an activation makes for a product."""
        if self.fp8:
            return 1
        return self.element_bytes if self.recomputation in ("none", "blocks") else 0

    def stream(self, elements: int) -> int:
        """Of a token's elements, those on this rank, rounded up."""
        return -(-elements // self.stream_share)

    def norm_result(self, elements: int) -> int:
        return self.stream(elements) if self.gathers_again else elements

    def keeps_input(self, projection: str) -> bool:
        return self.adapters is None or projection in self.adapters

    def inner(self, *projections: str) -> int:
        """Elements a token, of adapters."""
        return sum((self.adapters or {}).get(name, 0) for name in projections)

    @property
    def keeps_attention(self) -> bool:
        return self.recomputation in ("none", "elementwise")


def activation_bytes(config: ModelConfig, tokens: int, form: KeptForm) -> int:
    """What a step has kept when its forward pass ends, the gradient of the head's input included
    and logits left out.

    Counted with fused ops: a norm keeps its input, a matrix product its input, attention its q, k,
    v, output and one fp32 sum a head, a gated activation its input.
    """
    kept = sum(layer_bytes(config, layer, form) for layer in config.layers)
    stream = form.stream(config.hidden_size) * form.element_bytes
    kept += 2 * stream  # the last norm's input, the gradient of the head's
    if form.recomputation == "blocks":
        kept -= stream  # nothing is added yet to what the first block is given
    return tokens * (kept + angle_bytes(config) + ID_BYTES)


def layer_bytes(config: ModelConfig, layer: LayerConfig, form: KeptForm) -> int:
    """What a layer keeps for each token."""
    stream = form.stream(config.hidden_size) * form.element_bytes
    if form.recomputation == "blocks":
        return 2 * stream  # the stream, and the update that is to be added
    mlp = mlp_bytes(config, layer, form)
    return mlp + (attention_bytes(config, form) if form.keeps_attention else stream)


def attention_bytes(config: ModelConfig, form: KeptForm) -> int:
    """Of a token, from the first norm to attention's projection."""
    kept = form.stream(config.hidden_size)  # the norm's input
    kept += 2 * config.q_size + 2 * config.kv_size  # q, k, v and the output
    if config.qk_norm:
        kept += config.q_size + config.kv_size
    kept += form.stream(config.hidden_size * config.post_norms)
    kept += form.inner("qkv", "out")
    results = form.norm_result(config.hidden_size) * form.keeps_input(
        "qkv"
    )  # the inputs of both products
    results += config.q_size * form.fp8
    return kept * form.element_bytes + results * form.result_bytes + 4 * config.num_heads


def mlp_bytes(config: ModelConfig, layer: LayerConfig, form: KeptForm) -> int:
    """Of a token, from the second norm to the end."""
    kept = form.stream(config.hidden_size * (1 + config.post_norms))
    if layer.experts is not None:
        # the norm's result; of each expert its gathered input and its output to be weighted
        per_expert = 2 * config.hidden_size + 3 * layer.experts.mlp_size
        routed = layer.experts.num_experts + layer.experts.experts_per_token * per_expert
        return (kept + config.hidden_size + routed) * form.element_bytes
    kept += 2 * config.mlp_size + form.inner("gate_up", "down")
    results = form.norm_result(config.hidden_size) * form.keeps_input(
        "gate_up"
    )  # the inputs of both products
    results += config.mlp_size * form.keeps_input("down")
    return kept * form.element_bytes + results * form.result_bytes
