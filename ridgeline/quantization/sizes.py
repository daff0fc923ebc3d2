"""How many bytes quantized weights take, as linear.py keeps them; for memory plans and limits.

A layer's matrices are stored by the scheme where they fit it, the head by its own scheme where it
has one; experts, embeddings, norms, biases and routers stay in the model's dtype.

    weight_bytes(config, torch.bfloat16, parse_scheme("int4-g128"))
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

import torch

from ridgeline.models import ModelConfig, Transformer
from ridgeline.models.cost import num_expert_parameters, num_parameters
from ridgeline.quantization.block_scheme import BlockScheme
from ridgeline.quantization.linear import QuantizedLinear
from ridgeline.quantization.scheme import BLOCK, Scheme

FP32 = 4
HEAD = "head"  # its name in the model


class MatrixSize(NamedTuple):
    num_outputs: int
    depth: int


def weight_bytes(
    config: ModelConfig,
    dtype: torch.dtype,
    scheme: Scheme | None = None,
    kept: Mapping[str, Scheme] | None = None,
    head: Scheme | None = None,
) -> int:
    """All weights of a model: with one scheme for all its projections, or with `kept`, the schemes
    of those that are codes, by name (others are then plain). `head` is the head's scheme: a tied
    embedding is held in addition.
    """
    total = num_parameters(config) * dtype.itemsize
    head = head or (kept or {}).get(HEAD)
    for stored, matrix in stored_matrices(config, scheme, kept, head):
        total += stored_bytes(stored, matrix, dtype) - plain_bytes(matrix, dtype)
    embedding_is_extra = head is not None and config.tied_embeddings
    return total + plain_bytes(head_matrix(config), dtype) * embedding_is_extra


def stored_matrices(
    config: ModelConfig,
    scheme: Scheme | None,
    kept: Mapping[str, Scheme] | None = None,
    head: Scheme | None = None,
) -> Iterator[tuple[Scheme, MatrixSize]]:
    """The projections that are held as codes, and the head if it is."""
    if head is not None:
        yield head, head_matrix(config)
    if scheme is None and not kept:
        return
    for name, matrix in named_matrices(config):
        stored = scheme if kept is None else kept.get(name)
        if stored is not None and stored.fits(*matrix):
            yield stored, matrix


def expert_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Experts' matrices, which no scheme quantizes."""
    return num_expert_parameters(config) * dtype.itemsize


def plain_bytes(matrix: MatrixSize, dtype: torch.dtype) -> int:
    return matrix.num_outputs * matrix.depth * dtype.itemsize


def held_config(model: Transformer) -> ModelConfig:
    """The shape of what is in memory: one rank of several holds a part of the vocabulary, although
    its tokens and logits are those of the whole.
    """
    head = model.head
    size = head.out_features if isinstance(head, QuantizedLinear) else len(head.weight)
    return replace(model.config, vocab_size=size)


def read_bytes_per_weight(model: Transformer) -> float:
    """The mean over the weights that a step reads: all except an embedding that is not the head."""
    embed, config = model.embed.weight, held_config(model)
    if not any(isinstance(module, QuantizedLinear) for module in model.modules()):
        return float(embed.dtype.itemsize)
    held = sum(parameter.nbytes for parameter in model.parameters())
    only_looked_up = 0 if model.head.weight is embed else embed.nbytes
    unread = 0 if config.tied_embeddings else embed.numel()
    return (held - only_looked_up) / (num_parameters(config) - unread)


def bytes_per_weight(
    config: ModelConfig,
    dtype: torch.dtype,
    scheme: Scheme | None = None,
    head: Scheme | None = None,
    kept: Mapping[str, Scheme] | None = None,
) -> float:
    """The same of a model that is not there yet."""
    embedding = config.vocab_size * config.hidden_size
    unread = 0 if config.tied_embeddings else embedding
    looked_up = embedding if head is not None else unread  # codes are a copy of a tied one
    held = weight_bytes(config, dtype, scheme, kept, head) - looked_up * dtype.itemsize
    return held / (num_parameters(config) - unread)


def model_matrices(config: ModelConfig) -> Iterator[MatrixSize]:
    """The matrices of a model that a scheme quantizes."""
    return (matrix for _, matrix in named_matrices(config))


def head_matrix(config: ModelConfig) -> MatrixSize:
    return MatrixSize(config.vocab_size, config.hidden_size)


def named_matrices(config: ModelConfig) -> Iterator[tuple[str, MatrixSize]]:
    """The same by the names of the projections: `layers.0.attn.qkv`."""
    hidden = config.hidden_size
    for index, layer in enumerate(config.layers):
        yield f"layers.{index}.attn.qkv", MatrixSize(config.q_size + 2 * config.kv_size, hidden)
        yield f"layers.{index}.attn.out", MatrixSize(hidden, config.q_size)
        if layer.experts is None:
            yield f"layers.{index}.mlp.gate_up", MatrixSize(2 * config.mlp_size, hidden)
            yield f"layers.{index}.mlp.down", MatrixSize(hidden, config.mlp_size)


def stored_bytes(scheme: Scheme, matrix: MatrixSize, dtype: torch.dtype) -> int:
    """Codes and scales. Scales of groups are in the model's dtype, all others in fp32; a per-tensor
    scale is stored for each output.
    """
    num_outputs, depth = matrix
    if isinstance(scheme, BlockScheme):
        return scheme.num_bytes(depth)
    codes = num_outputs * depth * scheme.bits // 8
    if scheme.spread == "group":
        zero = 0 if scheme.symmetric else 1
        return codes + num_outputs * (depth // scheme.group) * (dtype.itemsize + zero)
    if scheme.spread == "block":
        return codes + (num_outputs // BLOCK) * (depth // BLOCK) * FP32
    return codes + num_outputs * FP32
