"""What a model costs, from its config alone: parameters, FLOPs and bytes of a step. What training
adds to that is in training_cost.py.

The one owner of these figures; planner, roofline, metrics and reports read them. A multiply-add is
two FLOPs. Element-wise work (norms, rotations, activations) is left out of the FLOPs: it is a
thousandth of the matrices'.

    cost = step_cost(config, [Chunk(new=1, past=1000)], weight_bytes=2, kv_bytes=2)
    seconds = max(cost.bytes / bandwidth, cost.flops / matrix_rate)
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ridgeline.models.config import LayerConfig, ModelConfig


@dataclass(frozen=True)
class Chunk:
    """One sequence's share of a step."""

    new: int  # tokens computed in this step
    past: int  # tokens already in the cache

    @property
    def total(self) -> int:
        return self.new + self.past


@dataclass(frozen=True)
class MeanStep:
    """What a step had in the mean of many."""

    rows: float  # sequences
    tokens: float  # computed
    logit_rows: float  # tokens that went through the head
    pairs: float  # of a token and a token it may see, itself included, windows left aside
    keys: float  # tokens whose keys a sequence reads, windows left aside, over the sequences


@dataclass(frozen=True)
class StepCost:
    matrix_flops: float  # weights times tokens
    attention_flops: float  # scores and their use, counting only keys a token may see
    dense_attention_flops: float  # the same counting every key, as torch.utils.flop_counter does
    weight_bytes: float  # read once, whatever the number of tokens
    kv_read_bytes: float
    kv_write_bytes: float

    @property
    def flops(self) -> float:
        return self.matrix_flops + self.attention_flops

    @property
    def dense_flops(self) -> float:
        return self.matrix_flops + self.dense_attention_flops

    @property
    def bytes(self) -> float:
        return self.weight_bytes + self.kv_read_bytes + self.kv_write_bytes


def num_parameters(config: ModelConfig) -> int:
    """All parameters, a tied head counted once."""
    head = 0 if config.tied_embeddings else config.vocab_size * config.hidden_size
    layers = sum(
        layer_matrices(config, layer) + _layer_vectors(config, layer) for layer in config.layers
    )
    return config.vocab_size * config.hidden_size + layers + config.hidden_size + head


def num_expert_parameters(config: ModelConfig) -> int:
    """Those of experts' matrices, routers left out."""
    return sum(
        layer.experts.num_held * _expert_matrices(config, layer)
        for layer in config.layers
        if layer.experts is not None
    )


def num_active_parameters(config: ModelConfig) -> int:
    """Parameters one token is multiplied with: the experts it goes through, the head, no embedding
    table.
    """
    matrices = sum(_active_matrices(config, layer) for layer in config.layers)
    vectors = sum(_layer_vectors(config, layer) for layer in config.layers)
    return matrices + vectors + config.hidden_size + config.vocab_size * config.hidden_size


def step_cost(
    config: ModelConfig,
    chunks: Sequence[Chunk],
    *,
    weight_bytes: float,
    kv_bytes: float,
    logit_rows: int | None = None,
) -> StepCost:
    """One forward pass over all chunks. `weight_bytes` and `kv_bytes` are per element; `logit_rows`
    is how many tokens go through the head (None: the last of each chunk).
    """
    windows = Counter(layer.window for layer in config.layers).items()
    counts = StepCounts(
        tokens=sum(chunk.new for chunk in chunks),
        rows=len(chunks) if logit_rows is None else logit_rows,
        visible_pairs=sum(
            num * _visible_pairs(chunk, window) for window, num in windows for chunk in chunks
        ),
        all_pairs=sum(chunk.new * chunk.total for chunk in chunks) * config.num_layers,
        keys_read=sum(
            num * _keys_read(chunk, window) for window, num in windows for chunk in chunks
        ),
    )
    return _cost(config, counts, weight_bytes, kv_bytes)


def mean_step_cost(
    config: ModelConfig,
    mean: MeanStep,
    *,
    weight_bytes: float,
    kv_bytes: float,
) -> StepCost:
    """One of many steps of which only the means are known. Exact where costs are sums of what was
    counted; a little high where the means hide that some contexts are shorter than a layer's
    window, or that steps of few tokens meet fewer experts.
    """
    visible_pairs = keys_read = 0.0
    for window, num in Counter(layer.window for layer in config.layers).items():
        if window is None:
            visible_pairs += num * mean.pairs
            keys_read += num * mean.keys
        else:
            visible_pairs += num * min(mean.pairs, mean.tokens * window)
            keys_read += num * min(mean.keys, mean.rows * (window - 1) + mean.tokens)
    all_pairs = math.nan  # a product of what was summed: means do not tell it
    counts = StepCounts(mean.tokens, mean.logit_rows, visible_pairs, all_pairs, keys_read)
    return _cost(config, counts, weight_bytes, kv_bytes)


@dataclass(frozen=True)
class StepCounts:
    """What a step has, over all layers."""

    tokens: float  # computed
    rows: float  # tokens that go through the head
    visible_pairs: float  # of a new token and a key it may see
    all_pairs: float  # the same counting every key
    keys_read: float


def _cost(
    config: ModelConfig, counts: StepCounts, weight_bytes: float, kv_bytes: float
) -> StepCost:
    head = config.vocab_size * config.hidden_size
    matrices = sum(_active_matrices(config, layer) for layer in config.layers)
    return StepCost(
        matrix_flops=2.0 * (counts.tokens * matrices + counts.rows * head),
        attention_flops=4.0 * config.q_size * counts.visible_pairs,
        dense_attention_flops=4.0 * config.q_size * counts.all_pairs,
        weight_bytes=weight_bytes * _weights_read(config, counts.tokens, counts.rows),
        kv_read_bytes=kv_bytes * 2.0 * config.kv_size * counts.keys_read,
        kv_write_bytes=kv_bytes * 2.0 * config.kv_size * counts.tokens * config.num_layers,
    )


def kv_bytes_per_token(config: ModelConfig, kv_bytes: float) -> float:
    """What one more token of context takes in the cache."""
    return 2.0 * config.kv_size * config.num_layers * kv_bytes


def angle_bytes(config: ModelConfig) -> int:
    """A token's cosines and sines in fp32, kept through all layers: one pair for each rope that
    differs.
    """
    ropes = {layer.rope for layer in config.layers if layer.rope is not None}
    return sum(2 * 4 * (rope.rotary_dim // 2) for rope in ropes)


def _attention_matrices(config: ModelConfig) -> int:
    return config.hidden_size * (2 * config.q_size + 2 * config.kv_size)


def layer_matrices(config: ModelConfig, layer: LayerConfig) -> int:
    """Parameters of a layer's matrices."""
    if layer.experts is None:
        return _attention_matrices(config) + 3 * config.hidden_size * config.mlp_size
    router = config.hidden_size * layer.experts.num_experts
    return (
        _attention_matrices(config)
        + router
        + layer.experts.num_held * _expert_matrices(config, layer)
    )


def layer_flops(config: ModelConfig, layer: LayerConfig) -> float:
    """Of one token's products with a layer's weights."""
    return 2.0 * _active_matrices(config, layer)


def _active_matrices(config: ModelConfig, layer: LayerConfig) -> int:
    if layer.experts is None:
        return layer_matrices(config, layer)
    held, experts = layer.experts.num_held, layer.experts
    unused = held - held * experts.experts_per_token // experts.num_experts
    return layer_matrices(config, layer) - unused * _expert_matrices(config, layer)


def _expert_matrices(config: ModelConfig, layer: LayerConfig) -> int:
    assert layer.experts is not None, "a dense layer has no experts"
    return 3 * config.hidden_size * layer.experts.mlp_size


def _layer_vectors(config: ModelConfig, layer: LayerConfig) -> int:
    """Norms and biases."""
    norms = (4 if config.post_norms else 2) * config.hidden_size + (
        2 * config.head_dim if config.qk_norm else 0
    )
    biases = (
        config.q_size + 2 * config.kv_size
    ) * config.qkv_bias + config.hidden_size * config.out_bias
    if config.mlp_bias and layer.experts is None:
        biases += 2 * config.mlp_size + config.hidden_size
    return norms + biases


def _weights_read(config: ModelConfig, tokens: float, rows: float) -> float:
    """Elements of all weights a step touches: the embedding rows of its tokens, and of the experts
    those that at least one token is expected to choose when the router spreads evenly.
    """
    read = float(min(tokens, config.vocab_size) * config.hidden_size + config.hidden_size)
    if rows:
        read += config.vocab_size * config.hidden_size
    for layer in config.layers:
        read += layer_matrices(config, layer) + _layer_vectors(config, layer)
        if layer.experts is not None:
            share = layer.experts.experts_per_token / layer.experts.num_experts
            read -= layer.experts.num_held * (1 - share) ** tokens * _expert_matrices(config, layer)
    return read


def _visible_pairs(chunk: Chunk, window: int | None) -> int:
    """Pairs of a new token and a key it may see: causal, and inside the window."""
    first, last = chunk.past + 1, chunk.total  # how many keys the first and the last new token see
    if window is None or last <= window:
        return (first + last) * chunk.new // 2
    rising = max(
        window - first + 1, 0
    )  # tokens that see fewer keys than the window, or just as many
    return (first + window) * rising // 2 + (chunk.new - rising) * window


def _keys_read(chunk: Chunk, window: int | None) -> int:
    return chunk.total if window is None else min(chunk.total, window + chunk.new - 1)
