"""What a forward pass holds at its peak: the tensors of models/transformer.py alive at once.

A layer is walked moment by moment. On a GPU every op allocates its results and little else
("fused"); the references that run on a CPU also write out in fp32 what they compute on the way
("reference"), above all attention's scores, one for each pair of a new token and a key. memory.py
plans with the largest moment.

    moment = peak(config, "bf16", "fused", num_tokens=8192, num_keys=8192)
    print(moment.name, moment.num_bytes)

Letters, as in the transformer: T tokens, S keys, D hidden size, F MLP size; Q and K are the columns
of all queries and of all keys. Sizes of a moment are bytes a token until they are multiplied by T.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ridgeline.formats.dtypes import dtype_bytes, parse_dtype
from ridgeline.models import ExpertsConfig, LayerConfig, ModelConfig
from ridgeline.models.cost import angle_bytes

FP32, INT64 = 4, 8


class Moment(NamedTuple):
    name: str  # what a layer is doing
    num_bytes: int


def peak(
    config: ModelConfig, dtype: str, kernels: str, *, num_tokens: int, num_keys: int
) -> Moment:
    """The moment that holds most. `num_tokens` are computed; at worst they belong to one sequence,
    which then has `num_keys` tokens.
    """
    element = dtype_bytes(parse_dtype(dtype))
    moments: list[Moment] = []
    for layer in set(config.layers):
        if kernels == "fused":
            moments += _fused(config, layer, element, num_tokens)
        else:
            moments += _reference(config, layer, element, num_tokens, num_keys)
    name, num_bytes = max(moments, key=lambda moment: moment.num_bytes)
    return Moment(name, num_bytes + num_tokens * angle_bytes(config))


def _held(config: ModelConfig, layer: LayerConfig, element: int) -> tuple[int, int, int]:
    """What a token holds in attention: up to its q, k, v; then their turned or normed copies; and
    the copies in between, where a norm and a rotation follow each other.
    """
    D, Q, K = config.hidden_size, config.q_size, config.kv_size
    projected = element * (D + Q + 2 * K)  # the residual; q, k and v in one
    steps = (layer.rope is not None) + config.qk_norm
    return projected, element * (Q + K) * (steps > 0), element * (Q + K) * (steps > 1)


def _fused(config: ModelConfig, layer: LayerConfig, element: int, T: int) -> Iterator[Moment]:
    D, Q = config.hidden_size, config.q_size
    projected, turned, between = _held(config, layer, element)
    yield Moment("rotary", T * (projected + turned + between))
    yield Moment("attention", T * (projected + turned + element * Q))
    folded = not config.post_norms and config.residual_scale == 1.0  # with the residual added
    yield Moment("projection", T * (projected + element * (Q + (1 + folded) * D)))
    before = 3 * element * D  # the residual, its sum with attention's part, and that normed
    if layer.experts is None:
        F = config.mlp_size
        yield Moment("MLP", T * (before + element * max(3 * F, F + D)))  # activating, projecting
        return
    chosen, size = layer.experts.experts_per_token, layer.experts.mlp_size
    routed = element * layer.experts.num_experts + chosen * (FP32 + INT64)
    slots = chosen * element * (size + D)  # each choice's hidden row and its output
    yield Moment("experts", T * (before + routed + slots + element * D))


def _reference(
    config: ModelConfig, layer: LayerConfig, element: int, T: int, S: int
) -> Iterator[Moment]:
    D, Q = config.hidden_size, config.q_size
    copy = 0 if element == FP32 else FP32  # bytes of an element's fp32 copy, where one is made
    projected, turned, between = _held(config, layer, element)
    yield Moment("norm", T * (3 * element * D + (copy + 2 * FP32) * D))
    yield Moment("rotary", T * (projected + between + (copy + 2 * FP32) * Q))
    own = projected + turned + element * Q + (copy + FP32) * Q  # the output, and q laid out by head
    yield Moment("attention", T * own + _scores(config, T, S))
    before = 3 * element * D
    if layer.experts is None:
        projecting = element * (config.mlp_size + D)
        widest = max(_gated(config.mlp_size, element, copy), projecting)
        yield Moment("MLP", T * (before + widest))
    else:
        yield Moment("experts", T * (before + _experts(config, layer.experts, element, copy)))


def _scores(config: ModelConfig, T: int, S: int) -> int:
    """Attention written out for one sequence: K and V of all its tokens in fp32, the scores twice
    (three times with a soft-cap), and the mask for each query head of a KV head.
    """
    keys = 2 * FP32 * config.kv_size * S
    pairs = FP32 * config.num_heads * T * S
    masked = 2 * pairs + T * S * (1 + config.num_heads // config.num_kv_heads)
    weighed = 2 * pairs + T * S + FP32 * config.q_size * T
    capped = 3 * pairs if config.attention_softcap is not None else 0
    return keys + max(masked, weighed, capped)


def _gated(mlp_size: int, element: int, copy: int) -> int:
    """gate-up and its activation: in the model's dtype, in fp32, and the product in both."""
    widest = 2 * mlp_size * (element + copy) + 2 * FP32 * mlp_size
    return widest + (element * mlp_size if copy else 0)


def _experts(config: ModelConfig, experts: ExpertsConfig, element: int, copy: int) -> int:
    """One expert after the other, at worst each with all tokens; what the last one made is held
    until the next one's takes its place.
    """
    D, F = config.hidden_size, experts.mlp_size
    routed = experts.num_experts * (FP32 + INT64)  # probabilities, sorted, and their order
    last = (element + FP32) * D  # its output, and that times its weight
    places = 2 * INT64  # which tokens come to it, and as which of their choices
    rows = places + element * D  # of the tokens, gathered
    projecting = rows + element * (3 * F + D)
    weighing = places + (copy + FP32) * D
    widest = max(rows + _gated(F, element, copy), projecting, weighing)
    return routed + FP32 * D + last + widest
