"""What `deterministic` holds beyond, or instead of, what a forward pass usually does.

On a CPU every product is made of blocks of rows that are put together afterwards, and attention
walks pairs of a block of queries and a page (deterministic_attention/host.py): `fixed_peak` has its
moments, as activations.py has those of the usual pass. On a GPU the pass is the usual one, and
products and decode attention keep the sums of their pieces apart for a while: `apart_bytes`.
`trial_bytes` is what a CPU takes beside its steps.

Letters as in activations.py; B blocks of queries, I items (a block and a page) at a time.
"""

from __future__ import annotations

from collections.abc import Iterator

from ridgeline.engine.memory.activations import FP32, Moment
from ridgeline.formats.dtypes import dtype_bytes, parse_dtype
from ridgeline.kernels.deterministic_attention.host import AT_ONCE, ITEMS, QUERIES
from ridgeline.kernels.deterministic_attention.splits import most_partial_bytes
from ridgeline.kernels.fixed_linear.host import BLOCK
from ridgeline.kernels.fixed_linear.tiles import most_kept_bytes
from ridgeline.models import ExpertsConfig, LayerConfig, ModelConfig
from ridgeline.models.cost import angle_bytes
from ridgeline.quantization.sizes import MatrixSize, model_matrices


def fixed_peak(
    config: ModelConfig,
    dtype: str,
    *,
    num_tokens: int,
    num_rows: int,
    num_keys: int,
    page_size: int,
) -> Moment:
    """On a CPU, for a step of `num_tokens` of which `num_rows` may be sequences' only ones; the
    longest has `num_keys`.
    """
    element = dtype_bytes(parse_dtype(dtype))
    rows = min(num_rows, num_tokens)
    num_blocks = rows + -(-(num_tokens - rows) // QUERIES)
    moments: list[Moment] = []
    for layer in set(config.layers):
        pages = _pages_seen(layer, num_keys, page_size)
        moments.append(_attention(config, element, num_tokens, num_blocks, pages, page_size))
        moments += _around(config, layer, element, num_tokens)
    name, num_bytes = max(moments, key=lambda moment: moment.num_bytes)
    return Moment(name, num_bytes + num_tokens * angle_bytes(config))


def _pages_seen(layer: LayerConfig, num_keys: int, page_size: int) -> int:
    pages = -(-num_keys // page_size)
    if layer.window is None:
        return pages
    return min(pages, -(-(layer.window + QUERIES) // page_size) + 1)


def _attention(
    config: ModelConfig, element: int, T: int, num_blocks: int, pages: int, page_size: int
) -> Moment:
    D, Q, K, N = config.hidden_size, config.q_size, config.kv_size, config.num_heads
    held = T * element * (D + 2 * Q + 2 * K) + T * FP32 * Q  # the residual, qkv, q, and q in fp32
    a_block = QUERIES * FP32 * Q
    blocks = num_blocks * (3 * a_block + 2 * QUERIES * FP32 * N)  # q twice, the output, its sums
    items = min(AT_ONCE, num_blocks * pages)
    more = min(AT_ONCE, num_blocks * pages - items)  # found while the items before are held
    an_item = a_block + 2 * QUERIES * FP32 * N
    read, scores = _product(config, element, page_size)
    finding = max(2 * items, items + 2 * more) * an_item + read  # the last pages are held, too
    finding = max(finding, (items + more) * an_item + read + scores)
    adding = (items + 3 * min(items, num_blocks)) * an_item
    copied = 0 if element == FP32 else num_blocks * QUERIES * element * Q
    ending = items * an_item + num_blocks * a_block + T * element * Q + copied
    return Moment("attention", held + blocks + max(finding, adding, ending))


def _product(config: ModelConfig, element: int, page_size: int) -> tuple[int, int]:
    """Keys and values of some items' pages; their queries, and scores thrice."""
    read = 2 * config.kv_size * page_size * FP32
    if element != FP32:
        read += config.kv_size * page_size * element
    scores = QUERIES * (3 * config.num_heads * page_size + config.q_size) * FP32
    return ITEMS * read, ITEMS * scores


def _around(config: ModelConfig, layer: LayerConfig, element: int, T: int) -> Iterator[Moment]:
    """Results of a product are there twice: in blocks, and put together."""
    D, Q, K = config.hidden_size, config.q_size, config.kv_size
    qkv = Q + 2 * K
    yield Moment("rotary", T * element * (2 * D + 2 * qkv))
    yield Moment("projection", T * element * (D + qkv + Q + 3 * D))
    before = 3 * element * D  # the residual, its sum with attention's part, and that normed
    if layer.experts is None:
        yield Moment("MLP", T * (before + _gated(config, config.mlp_size, element)))
    else:
        yield Moment("experts", T * (before + _experts(config, layer.experts, element)))


def _gated(config: ModelConfig, mlp_size: int, element: int) -> int:
    """gate-up and its activation, for a token."""
    return max(4 * element * mlp_size, _activated(config, mlp_size, element))


def _activated(config: ModelConfig, mlp_size: int, element: int) -> int:
    copied = 0 if element == FP32 else 2 * FP32
    steps = 4 if config.activation == "gelu_tanh" else 3
    return mlp_size * (2 * element + copied + steps * FP32)


def _experts(config: ModelConfig, experts: ExpertsConfig, element: int) -> int:
    """At worst each has all tokens; what the last one made is held until the next one is done."""
    D, F = config.hidden_size, experts.mlp_size
    projecting = element * (D + F + 4 * F)  # of rows gathered, beside the last one's hidden rows
    adding = element * F + 3 * FP32 * D
    return 2 * FP32 * D + max(projecting, _activated(config, F, element), adding)


def trial_bytes(config: ModelConfig, dtype: str) -> int:
    """On a CPU each shape of product is tried once, on a random weight (cpu_fixed.py)."""
    element = dtype_bytes(parse_dtype(dtype))
    made = FP32 if element == FP32 else FP32 + element
    most = 0
    for num_outputs, depth in _products(config):
        tried = num_outputs * (element * depth + 4 * BLOCK * element)  # a row of each place
        most = max(most, tried, num_outputs * depth * made)
    return most


def apart_bytes(config: ModelConfig, *, num_tokens: int, num_rows: int, num_keys: int) -> int:
    """On a GPU, at most: one product's sums or one layer's attention at a time."""
    products = (most_kept_bytes(*matrix, num_tokens) for matrix in _products(config))
    attention = (
        most_partial_bytes(
            config.num_heads, config.num_kv_heads, config.head_dim, num_rows, num_keys, window
        )
        for window in {layer.window for layer in config.layers}
    )
    return max(*products, *attention)


def _products(config: ModelConfig) -> set[MatrixSize]:
    """Projections, the head, and one expert's."""
    matrices = set(model_matrices(config)) | {MatrixSize(config.vocab_size, config.hidden_size)}
    for experts in {layer.experts for layer in config.layers if layer.experts is not None}:
        matrices |= {MatrixSize(2 * experts.mlp_size, config.hidden_size)}
        matrices |= {MatrixSize(config.hidden_size, experts.mlp_size)}
    return matrices
