"""How many bytes each part of a running engine takes on one device: weights, pages, logits, graphs.

Sizes only; memory.py adds them up to a plan. Layouts belong to others and are read from there:
pages to kernels/pages.py, parameters and KV to models/cost.py, quantized weights to
quantization/sizes.py, activations to activations.py.

    weight_bytes(config, "bf16")                        # 16.1e9 for Llama-3.1-8B
    weight_bytes(config, "bf16", "int4-g128")           # 5.7e9: head and embeddings stay in bf16
    bytes_per_page(part_of(config, recipe), recipe)     # on one of two devices
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from ridgeline.engine.memory.activations import FP32, Moment, peak
from ridgeline.engine.memory.fixed_activations import apart_bytes, fixed_peak, trial_bytes
from ridgeline.formats.dtypes import dtype_bytes, parse_dtype
from ridgeline.kernels.pages import holds_codes
from ridgeline.kernels.quantized_linear.many_rows import MAX_COPY_BYTES
from ridgeline.models import ModelConfig
from ridgeline.models.cost import kv_bytes_per_token
from ridgeline.quantization import sizes
from ridgeline.quantization.head import HEAD
from ridgeline.quantization.scheme import Scheme, parse_scheme
from ridgeline.recipe import Head, Recipe

KeptSchemes = Mapping[
    str, Scheme
]  # by projection: codes that a checkpoint, or a model, has already

# Allowances for what is not counted tensor by tensor (none of them measured yet, 2026-11-15).
WORKSPACE_BYTES = {  # scratch of libraries: cuBLAS's and split kernels' sums on a GPU, oneDNN's
    "fused": 128 << 20,
    "reference": 32 << 20,
}
NUM_GRAPHS = 128  # sizes of steps that are captured; those between are padded up
# Rows of a step with drafts, if it has fewer: another graph is captured in the middle of a stream,
# which waits for as long as hundreds of steps take; and up to 16 rows a product takes as long.
FEWEST_DRAFTED = 12
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
REFERENCE_COPIES = 4  # fp32 tensors of a weight's size that its reference holds at once


def weight_bytes(
    config: ModelConfig,
    dtype: str,
    scheme: str | None = None,
    kept: KeptSchemes | None = None,
    head: Head = "plain",
) -> int:
    """All weights: with a scheme, or with codes that a checkpoint has already, as
    quantization/sizes.py says.
    """
    known = None if scheme is None else parse_scheme(scheme)
    return sizes.weight_bytes(config, parse_dtype(dtype), known, kept, _head_scheme(head, kept))


def _head_scheme(head: Head, kept: KeptSchemes | None) -> Scheme | None:
    """What the recipe asks for, or what the model that is there has."""
    return (kept or {}).get(HEAD) if head == "plain" else parse_scheme(head)


def expanded_bytes(config: ModelConfig, recipe: Recipe, kept: KeptSchemes | None = None) -> int:
    """The largest quantized matrix on its way back to the model's dtype, for steps of many tokens:
    on a GPU a piece of it at a time, or sums of int8 codes, and nothing for fp8.
    """
    stored = {(one.name, m): one for one, m in _stored(config, recipe, kept)}
    return max((_expanded(recipe, one, m) for (_, m), one in stored.items()), default=0)


def copied_bytes(config: ModelConfig, recipe: Recipe, kept: KeptSchemes | None = None) -> int:
    """Of weights that are codes, in the model's dtype too."""
    if not recipe.copies:
        return 0
    stored = _stored(config, recipe, kept)
    weights = sum(m.num_outputs * m.depth for scheme, m in stored if scheme.inputs == "16-bit")
    return weights * dtype_bytes(parse_dtype(recipe.dtype))


def _stored(
    config: ModelConfig, recipe: Recipe, kept: KeptSchemes | None
) -> Iterator[tuple[Scheme, sizes.MatrixSize]]:
    known = None if recipe.scheme is None else parse_scheme(recipe.scheme)
    return sizes.stored_matrices(config, known, kept, _head_scheme(recipe.head, kept))


def _expanded(recipe: Recipe, scheme: Scheme, matrix: sizes.MatrixSize) -> int:
    element = dtype_bytes(parse_dtype(recipe.dtype))
    size = matrix.num_outputs * matrix.depth
    if recipe.graphs:
        whole = {"fp8": 0, "int8": MAX_COPY_BYTES, "16-bit": size * element}[scheme.inputs]
        return min(MAX_COPY_BYTES, whole)
    return size * (element if recipe.kernels == "fused" else REFERENCE_COPIES * FP32)


def bytes_per_page(config: ModelConfig, recipe: Recipe) -> int:
    """Keys and values of a page's tokens in all layers, with their scales where they are codes."""
    dtype = parse_dtype(recipe.kv.dtype)
    per_token = kv_bytes_per_token(config, dtype_bytes(dtype))
    if holds_codes(dtype):
        per_token += kv_bytes_per_token(config, FP32) / config.head_dim
    return round(per_token) * recipe.kv.page_size


def step_peak(config: ModelConfig, recipe: Recipe, num_tokens: int) -> Moment:
    """Where a step of this many tokens holds most, and how much; `config` is the device's part."""
    limits = recipe.limits.filled()
    sizes = {"num_tokens": num_tokens, "num_keys": limits.max_context}
    if recipe.deterministic and recipe.kernels == "reference":
        rows, page_size = limits.max_batch, recipe.kv.page_size
        return fixed_peak(config, recipe.dtype, **sizes, num_rows=rows, page_size=page_size)
    return peak(config, recipe.dtype, recipe.kernels, **sizes)


def fixed_bytes(config: ModelConfig, recipe: Recipe, num_tokens: int) -> int:
    """What `deterministic` takes beside a step's activations."""
    if not recipe.deterministic:
        return 0
    parts = _parts_bytes(config, recipe, num_tokens)
    if recipe.kernels == "reference":
        return max(trial_bytes(config, recipe.dtype), parts)
    limits = recipe.limits.filled()
    rows, keys = min(num_tokens, limits.max_batch), limits.max_context
    apart = apart_bytes(config, num_tokens=num_tokens, num_rows=rows, num_keys=keys)
    return max(apart, parts)


def _parts_bytes(config: ModelConfig, recipe: Recipe, num_tokens: int) -> int:
    """Of a sum over ranks each holds all parts, and two sums of them in fp32."""
    num_ranks = recipe.parallel.tensor
    if num_ranks == 1:
        return 0
    element = dtype_bytes(parse_dtype(recipe.dtype))
    return num_tokens * config.hidden_size * (num_ranks * element + 3 * FP32)


def logit_rows(recipe: Recipe, num_requests: int) -> int:
    """Rows that want logits in a step: one a request, and one for each token that was drafted."""
    speculation = recipe.speculation
    drafted = 0 if speculation.method == "none" else speculation.max_draft_tokens
    return min(num_requests * (1 + drafted), recipe.limits.filled().token_budget)


def logit_bytes(config: ModelConfig, recipe: Recipe, rows: int) -> int:
    """Logits in the model's dtype and, on a CPU, then in fp32 (a recipe without graphs may be for
    one); scaling and soft-cap write them again, in fp32. Each of several devices makes its part of
    the vocabulary, and then holds all of it. A head of codes makes them in a place of its own.
    """
    element = dtype_bytes(parse_dtype(recipe.dtype))
    made = element * (1 + (recipe.parallel.tensor > 1 or recipe.head != "plain"))
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


def graph_bytes(rank: ModelConfig, recipe: Recipe, vocab_size: int) -> int:
    """Captured graphs keep memory of their own: a pool with the tensors of the largest step, which
    all of them share, and what the driver stores for each kernel. `rank` is the device's part, and
    `vocab_size` that of the logits it puts together.
    """
    limits, config = recipe.limits.filled(), replace(rank, vocab_size=vocab_size)
    tensors = step_peak(rank, recipe, limits.max_graph_batch).num_bytes
    tensors += fixed_bytes(rank, recipe, limits.max_graph_batch)
    rows = logit_rows(recipe, min(limits.max_graph_batch, limits.max_batch))
    if recipe.speculation.method != "none":
        rows = max(rows, FEWEST_DRAFTED)
    rows = min(rows, limits.max_graph_batch)
    pool = GRAPH_POOL_BYTES + tensors + logit_bytes(config, recipe, rows)
    return pool + min(NUM_GRAPHS, limits.max_graph_batch) * driver_bytes(config)


def driver_bytes(config: ModelConfig) -> int:
    """What the driver stores for one captured graph."""
    return NODES_A_LAYER * config.num_layers * GRAPH_NODE_BYTES
