"""How many bytes each part of a running engine takes on one device: weights, pages, logits, graphs.

Sizes only; memory.py adds them up to a plan. Layouts belong to others and are read from there:
pages to kernels/pages.py, parameters and KV to models/cost.py, activations to activations.py.

    weight_bytes(config, "bf16")                        # 16.1e9 for Llama-3.1-8B
    weight_bytes(config, "bf16", "int4-g128")           # 5.7e9: head and embeddings stay in bf16
    bytes_per_page(rank_config(config, 2), recipe)      # on one of two devices
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from ridgeline.engine.activations import FP32, Moment, peak
from ridgeline.errors import UnsupportedError
from ridgeline.formats.dtypes import dtype_bytes, parse_dtype
from ridgeline.kernels.pages import holds_codes
from ridgeline.models import LayerConfig, ModelConfig
from ridgeline.models.cost import kv_bytes_per_token, num_parameters
from ridgeline.parallel.degrees import rank_config
from ridgeline.recipe import Recipe

# Allowances for what is not counted tensor by tensor (none of them measured yet, 2026-11-15).
WORKSPACE_BYTES = {  # scratch of libraries: cuBLAS's and split kernels' sums on a GPU, oneDNN's
    "fused": 128 << 20,
    "reference": 32 << 20,
}
NUM_GRAPHS = 80  # sizes of steps that are captured; those between are padded up
NODES_A_LAYER = 10  # kernels a layer launches
GRAPH_NODE_BYTES = 16 << 10  # what the driver keeps for one kernel of a captured graph

# What a pool of graphs takes however small the model is: cuBLAS's workspace for the stream of
# captures (32 MiB on sm_90, in one piece or two), and torch's allocator, which takes 20 MiB at a
# time for tensors of 1 to 10 MiB and 2 MiB for smaller ones, the last of each partly empty.
GRAPH_POOL_BYTES = 128 << 20

PENALTY_TABLE_BYTES = 4 + 1  # per request and vocabulary entry: int32 counts, seen in the prompt
STEP_TOKEN_BYTES = 48  # per token of a step: id, position, length, slot and indices
PAGE_NUMBER_BYTES = 4
TOKEN_BYTES = 4


class WeightFormat(NamedTuple):
    """How a scheme stores a matrix."""

    bits: int
    group: int | None  # inputs that share a 16-bit scale; None: one fp32 scale for each output


class Matrix(NamedTuple):
    copies: int  # how many of them a layer has
    num_outputs: int
    num_inputs: int


def weight_format(scheme: str) -> WeightFormat:
    """What a scheme's name says of its size: `int4-g128`, `int8`, `fp8`, `fp8-dynamic`."""
    found = re.fullmatch(r"(int4|int8|fp8)(?:-g(\d+))?(?:[-_.].*)?", scheme)
    if found is None or found[2] == "0":
        raise UnsupportedError(
            f"the size of weights in scheme {scheme!r} is not known; use int4, int8 or fp8, "
            "with -g128 behind it for groups of 128"
        )
    bits = 4 if found[1] == "int4" else 8
    group = int(found[2]) if found[2] else (128 if bits == 4 else None)
    return WeightFormat(bits, group)


def weight_bytes(config: ModelConfig, dtype: str, scheme: str | None = None) -> int:
    """All weights: with a scheme the layers' matrices are stored in its format, and embeddings,
    head, norms, biases and routers stay as they are.
    """
    element = dtype_bytes(parse_dtype(dtype))
    total = num_parameters(config) * element
    if scheme is None:
        return total
    stored = weight_format(scheme)
    for layer in config.layers:
        for matrix in layer_matrices(config, layer):
            plain = matrix.num_outputs * matrix.num_inputs * element
            total += matrix.copies * (_stored_bytes(matrix, stored) - plain)
    return total


def layer_matrices(config: ModelConfig, layer: LayerConfig) -> Iterator[Matrix]:
    """What a scheme quantizes in a layer."""
    hidden = config.hidden_size
    yield Matrix(1, config.q_size + 2 * config.kv_size, hidden)
    yield Matrix(1, hidden, config.q_size)
    copies = layer.experts.num_experts if layer.experts else 1
    mlp_size = layer.experts.mlp_size if layer.experts else config.mlp_size
    yield Matrix(copies, 2 * mlp_size, hidden)
    yield Matrix(copies, hidden, mlp_size)


def _stored_bytes(matrix: Matrix, stored: WeightFormat) -> int:
    codes = matrix.num_outputs * matrix.num_inputs * stored.bits // 8
    if stored.group is None:
        return codes + matrix.num_outputs * FP32
    return codes + matrix.num_outputs * -(-matrix.num_inputs // stored.group) * 2


def bytes_per_page(config: ModelConfig, recipe: Recipe) -> int:
    """Keys and values of a page's tokens in all layers, with their scales where they are codes."""
    dtype = parse_dtype(recipe.kv.dtype)
    per_token = kv_bytes_per_token(config, dtype_bytes(dtype))
    if holds_codes(dtype):
        per_token += kv_bytes_per_token(config, FP32) / config.head_dim
    return round(per_token) * recipe.kv.page_size


def step_peak(config: ModelConfig, recipe: Recipe, num_tokens: int) -> Moment:
    """Where a step of this many tokens holds most, and how much; `config` is the device's part."""
    longest = recipe.limits.filled().max_context
    return peak(config, recipe.dtype, recipe.kernels, num_tokens=num_tokens, num_keys=longest)


def logit_rows(recipe: Recipe, num_requests: int) -> int:
    """Rows that want logits in a step: one a request, and one for each token that was guessed."""
    speculation = recipe.speculation
    guessed = 0 if speculation.method == "none" else speculation.max_draft_tokens
    return min(num_requests * (1 + guessed), recipe.limits.filled().token_budget)


def logit_bytes(config: ModelConfig, recipe: Recipe, rows: int) -> int:
    """Logits in the model's dtype and, on a CPU, then in fp32 (a recipe without graphs may be for
    one); scaling and soft-cap write them again, in fp32. Each of several devices makes its part of
    the vocabulary, and then holds all of it.
    """
    element = dtype_bytes(parse_dtype(recipe.dtype))
    made = element * (1 + (recipe.parallel.tensor > 1))
    if not recipe.graphs and element != FP32:
        made += FP32
    scaled = 2 * FP32 if config.logit_scale != 1.0 else 0
    capped = 3 * FP32 if config.final_softcap is not None else 0
    return rows * (config.vocab_size * max(made, scaled, capped) + element * config.hidden_size)


def step_input_bytes(recipe: Recipe) -> int:
    limits = recipe.limits.filled()
    pages = limits.max_batch * -(-limits.max_context // recipe.kv.page_size)
    return pages * PAGE_NUMBER_BYTES + limits.token_budget * STEP_TOKEN_BYTES


def rotary_table_bytes(config: ModelConfig, max_context: int) -> int:
    """Cosines and sines in fp32 of every position (rope_tables.py)."""
    ropes = {layer.rope for layer in config.layers if layer.rope is not None}
    dims = (rope.rotary_dim * (1 + (rope.type == "longrope")) for rope in ropes)
    return max_context * FP32 * sum(dims)


def token_table_bytes(recipe: Recipe) -> int:
    limits = recipe.limits.filled()
    return (limits.max_batch + 1) * (limits.max_context + 1) * TOKEN_BYTES


def graph_bytes(config: ModelConfig, recipe: Recipe) -> int:
    """Captured graphs keep memory of their own: a pool with the tensors of the largest step, which
    all of them share, and what the driver stores for each kernel.
    """
    limits = recipe.limits.filled()
    rank = rank_config(config, recipe.parallel.tensor)
    tensors = step_peak(rank, recipe, limits.max_graph_batch).num_bytes
    rows = logit_rows(recipe, min(limits.max_graph_batch, limits.max_batch))
    rows = min(rows, limits.max_graph_batch)
    pool = GRAPH_POOL_BYTES + tensors + logit_bytes(config, recipe, rows)
    return pool + min(NUM_GRAPHS, limits.max_graph_batch) * driver_bytes(config)


def driver_bytes(config: ModelConfig) -> int:
    """What the driver stores for one captured graph."""
    return NODES_A_LAYER * config.num_layers * GRAPH_NODE_BYTES
