"""What the registry knows of attention over packed documents: work, shapes, baselines."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ridgeline.formats.dtypes import dtype_name
from ridgeline.kernels.attention.reference import AttentionSpec
from ridgeline.kernels.cost import OpCost
from ridgeline.kernels.document_attention import document_attention, reference
from ridgeline.kernels.document_attention.reference import Documents
from ridgeline.kernels.inputs import given, label, normal
from ridgeline.kernels.op import Case, Op, OpInputs, case_lists, functions

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


@dataclass(frozen=True)
class DocumentsCase:
    lengths: tuple[int, ...]
    heads: tuple[int, int] = (4, 2)  # of queries, of keys and values
    head_dim: int = 64
    dtype: torch.dtype = BF16
    window: int | None = None
    softcap: float | None = None
    keys: tuple[int, ...] | None = None  # of each document, where they are more than its queries
    blocks: tuple[int, ...] | None = None  # smaller ones, so that a test has several

    @property
    def label(self) -> str:
        lengths = self.lengths
        name = "+".join(map(str, lengths))
        if len(set(lengths)) == 1 and len(lengths) > 1:
            name = f"{len(lengths)}x{lengths[0]}"
        return label(
            name if len(name) < 40 else f"{len(lengths)} documents of {sum(lengths)}",
            (*self.heads, self.head_dim),
            self.dtype,
            self.window and f"window {self.window}",
            self.softcap and f"cap {self.softcap:g}",
            self.keys and f"{sum(self.keys)} keys",
        )


def make(setting: DocumentsCase, device: torch.device, generator: torch.Generator) -> OpInputs:
    num_tokens, (num_heads, num_kv_heads) = sum(setting.lengths), setting.heads
    num_keys = sum(setting.keys or setting.lengths)
    width = (num_heads + 2 * num_kv_heads) * setting.head_dim
    # As in the model: columns of the fused projection's output.
    fused = normal((num_keys, width), setting.dtype, device, generator)
    heads = fused.unflatten(1, (-1, setting.head_dim))
    q, k, v = heads.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    q = q[:num_tokens]
    inputs: OpInputs = {
        "q_TNH": q,
        "k_SKH": k,
        "v_SKH": v,
        "grad_TNH": normal(tuple(q.shape), setting.dtype, device, generator),
        "documents": Documents.of(setting.lengths, device),
        "spec": AttentionSpec(setting.head_dim**-0.5, setting.window, setting.softcap),
    }
    keys = setting.keys and Documents.of(setting.keys, device)
    return inputs | given(keys=keys, blocks=setting.blocks)


def case(*args: Any, **settings: Any) -> Case:
    setting = DocumentsCase(*args, **settings)
    return Case(
        setting.label,
        partial(make, setting),
        setting.dtype,
        # A score sums a head's products, an output or a gradient as many of them as keys.
        reduction=setting.head_dim * max(setting.keys or setting.lengths),
        roundings=4,  # the softmax and its gradient, for the products with them
    )


NEIGHBOURS = 8  # tokens whose gradients are one row


def compared(out: Tensor, *grads: Tensor) -> tuple[Tensor, ...]:
    """Gradients with some neighbours' as one row. A document's first query has none, and what
    rounding leaves of it is small beside the others', not beside zero; the first few have far
    larger ones than the last, and rounding errors of that size.
    """
    return out, *(in_rows(grad.flatten(1)) for grad in grads)


def in_rows(grad_TD: Tensor) -> Tensor:
    together = min(NEIGHBOURS, len(grad_TD))
    padded = functional.pad(grad_TD, (0, 0, 0, -len(grad_TD) % together))
    return padded.reshape(-1, together * grad_TD.shape[1])


def define(
    q_TNH: Tensor,
    k_SKH: Tensor,
    v_SKH: Tensor,
    grad_TNH: Tensor,
    documents: Documents,
    spec: AttentionSpec,
    keys: Documents | None = None,
    blocks: Any = None,
) -> tuple[Tensor, ...]:
    """The reference and its gradients by autograd in fp32, each rounded once."""
    leaves = [x.detach().float().requires_grad_() for x in (q_TNH, k_SKH, v_SKH)]
    q, k, v = leaves
    out = reference.document_attention(q, k, v, documents, spec, keys)
    grads = torch.autograd.grad(out, leaves, grad_TNH.float())
    return compared(*(x.detach().to(q_TNH.dtype) for x in (out, *grads)))


def launch(
    q_TNH: Tensor,
    k_SKH: Tensor,
    v_SKH: Tensor,
    grad_TNH: Tensor,
    documents: Documents,
    spec: AttentionSpec,
    keys: Documents | None = None,
    blocks: tuple[int, ...] | None = None,
) -> tuple[Tensor, ...]:
    """The result and all gradients: what a training step takes from it."""
    from ridgeline.kernels.document_attention import triton

    own = None if blocks is None else triton.Blocks(*blocks)
    bounds = triton.bounds(documents, len(q_TNH), keys, spec.window)
    attended = triton.attend(q_TNH, k_SKH, v_SKH, bounds, spec, own)
    grads = triton.gradients(q_TNH, k_SKH, v_SKH, attended, grad_TNH, bounds, spec, own)
    return compared(attended.out_TNH, *grads)


def cost(
    q_TNH: Tensor,
    k_SKH: Tensor,
    documents: Documents,
    spec: AttentionSpec,
    keys: Documents | None = None,
    **_: Any,
) -> OpCost:
    """Two products forward and five backward over the pairs of tokens that see each other."""
    lengths = (keys or documents).lengths
    most = spec.window or max(lengths)
    num_pairs = sum(
        pairs(most, num_keys) - pairs(most, num_keys - num_queries)
        for num_queries, num_keys in zip(documents.lengths, lengths, strict=True)
    )
    num_heads, head_dim = q_TNH.shape[1:]
    return OpCost(
        2 * q_TNH.nbytes + 2 * k_SKH.nbytes,
        2 * q_TNH.nbytes + 2 * k_SKH.nbytes,
        flops=14.0 * num_pairs * num_heads * head_dim,
        matrix_dtype=dtype_name(q_TNH.dtype),
    )


def pairs(most: int, length: int) -> int:
    """That see each other in a document, where a token sees so many at most."""
    hidden = max(length - most, 0)
    return length * (length + 1) // 2 - hidden * (hidden + 1) // 2


def by_torch(
    path: Any,
    q_TNH: Tensor,
    k_SKH: Tensor,
    v_SKH: Tensor,
    grad_TNH: Tensor,
    documents: Documents,
    spec: AttentionSpec,
    keys: Documents | None = None,
    **_: Any,
) -> tuple[Tensor, ...]:
    leaves = [x.detach().requires_grad_() for x in (q_TNH, k_SKH, v_SKH)]
    q, k, v = leaves
    out = document_attention(q, k, v, documents, spec, path, keys=keys)
    return out.detach(), *torch.autograd.grad(out, leaves, grad_TNH)


TILES = (16, 16, 16, 16, 16, 4)
UNEVEN = (5, 1, 17, 9, 33)
SMALL = [
    case((2, 1), dtype=FP32),
    case(UNEVEN, dtype=FP32, head_dim=16, blocks=TILES),
    case(UNEVEN, dtype=BF16, head_dim=32, blocks=TILES),
    case(UNEVEN, (6, 2), 24, FP16, window=7, blocks=(32, 16, 16, 32, 16, 4)),
    case((40, 25), (2, 2), 16, FP32, softcap=1.5, blocks=TILES),
    case((64, 3), (4, 1), 16, FP32, window=16, softcap=2.0, blocks=(16, 32, 32, 16, 32, 4)),
    case((5, 1, 17, 33), dtype=FP32, head_dim=16, keys=(40, 20, 17, 50), blocks=TILES),
    case((20, 3), (4, 1), 16, FP32, window=9, softcap=2.0, keys=(20, 60), blocks=TILES),
]
LARGE = [
    case((1000, 24, 3072), (32, 8), 64),
    case((1000, 24, 3072), (8, 2), 128, window=512),
    case((700, 324), (8, 4), 256, softcap=50.0),
    case((700, 324), (4, 4), 80, FP32),
    case((1000, 24, 512), (32, 8), 64, keys=(3000, 24, 600)),
    case((1000, 24), (8, 2), 128, window=300, keys=(1300, 24)),
]
BENCH = [
    case((4096,) * 8, (32, 8), 64),
    case((4096,) * 8, (32, 8), 128),
    case((8192, 1024, 512, 6656, 4096, 12288), (32, 8), 64),
    case((8192, 1024, 512, 6656, 4096, 12288), (32, 8), 64, window=1024),
]
COMPILE = [
    case((64,), (32, 8), 64),
    case((64,), (32, 8), 128),
    case((64,), (8, 4), 256, window=32, softcap=50.0),
    case((64,), (4, 4), 80, FP32),
]

OP = Op(
    name="document_attention",
    summary="Attention over packed documents with gradients: windows, soft cap, GQA",
    **functions(
        define,
        launch,
        cost,
        cudnn=partial(by_torch, "cudnn"),
        flash=partial(by_torch, "flash"),
        varlen=partial(by_torch, "varlen"),
    ),
    **case_lists(SMALL, LARGE, BENCH, COMPILE),
)
