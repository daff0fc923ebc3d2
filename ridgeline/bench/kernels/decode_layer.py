"""One decode step through a whole layer of Llama-3.1-8B's shape: five kernels, with the norms,
SwiGLU and the residuals folded into the projections, and the rotary embedding into attention.

The layer is written once (`decode_layer`) over the functions it calls: our launchers, what the
public functions choose (which may be cuBLAS), or the references. Letters: B sequences, D hidden
size; the pages' own are in kernels/pages.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ridgeline.kernels.attention.decode_run import DecodeRun
from ridgeline.kernels.attention.inputs import contiguous_pages, newest_slots, random_cache
from ridgeline.kernels.attention.reference import AttentionSpec
from ridgeline.kernels.cost import OpCost
from ridgeline.kernels.inputs import has_floats_of, label, normal
from ridgeline.kernels.op import Case, Op, OpInputs
from ridgeline.kernels.pages import Pages, PageTables
from ridgeline.kernels.projected_attention import Projected, projected_attention
from ridgeline.kernels.projected_attention import reference as attention_reference
from ridgeline.kernels.quantized_linear import Operands, quantized_linear
from ridgeline.kernels.quantized_linear.op import FP8A16, W4A16, W8A16, make_weight
from ridgeline.kernels.skinny_linear import skinny_linear
from ridgeline.kernels.skinny_linear.fused import FusedParts

BF16 = torch.bfloat16
EPS = 1e-5
MADE = {"fp8": FP8A16, "int8": W8A16, "int4": W4A16}


@dataclass(frozen=True)
class LayerShape:
    """Of a layer; the default is Llama-3.1-8B's."""

    hidden_size: int = 4096
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    mlp_size: int = 14336

    @property
    def projections(self) -> dict[str, tuple[int, int]]:
        """Outputs and depth."""
        heads = self.num_heads * self.head_dim
        return {
            "qkv": (heads + 2 * self.num_kv_heads * self.head_dim, self.hidden_size),
            "o": (self.hidden_size, heads),
            "gate_up": (2 * self.mlp_size, self.hidden_size),
            "down": (self.hidden_size, self.mlp_size),
        }


class LayerWeight(NamedTuple):
    values: Tensor  # as skinny_linear takes them, or with a scale as quantized_linear does
    scale: Tensor | None = None


class Functions(NamedTuple):
    """What a layer is made of; each takes what the public function takes."""

    linear: Callable[..., Tensor]
    attention: Callable[..., Tensor]


def linear(
    plain: Callable[..., Tensor],
    quantized: Callable[..., Tensor],
    x_BD: Tensor,
    weight: LayerWeight,
    fused: FusedParts,
) -> Tensor:
    if weight.scale is None:
        return plain(x_BD, weight.values, fused)
    return quantized(Operands(x_BD, weight.values, weight.scale), fused)


def launchers() -> Functions:
    """Our kernels, whatever was measured to be faster."""
    from ridgeline.kernels.projected_attention import triton as attention
    from ridgeline.kernels.quantized_linear import triton as quantized
    from ridgeline.kernels.skinny_linear import triton as skinny

    return Functions(
        partial(linear, skinny.skinny_linear, quantized.quantized_linear),
        attention.projected_attention,
    )


def chosen() -> Functions:
    """What the engine calls in a step of decode rows alone."""
    attention = partial(projected_attention, run=DecodeRun(settled=True))
    return Functions(partial(linear, skinny_linear, quantized_linear), attention)


def references() -> Functions:
    from ridgeline.kernels.quantized_linear import reference as quantized
    from ridgeline.kernels.skinny_linear import reference as skinny

    return Functions(
        partial(linear, skinny.skinny_linear, quantized.quantized_linear),
        attention_reference.projected_attention,
    )


def decode_layer(
    functions: Functions,
    x_BD: Tensor,
    norms: Mapping[str, Tensor],
    weights: Mapping[str, LayerWeight],
    angles: tuple[Tensor, Tensor],
    slots_B: Tensor,
    pages: Pages,
    tables: PageTables,
    spec: AttentionSpec,
) -> Tensor:
    """The layer's output; **changes the pages in place**: the new token's K and V."""
    linear, before = functions.linear, partial(FusedParts, eps=EPS)
    qkv = linear(x_BD, weights["qkv"], before(norm_weight_D=norms["attention"]))
    rows = Projected(qkv, angles, slots_B)
    attended = functions.attention(rows, pages, tables, spec)
    hidden = linear(attended.flatten(1), weights["o"], FusedParts(residual_MO=x_BD))
    gated = before(norm_weight_D=norms["mlp"], activation="silu")
    inner = linear(hidden, weights["gate_up"], gated)
    return linear(inner, weights["down"], FusedParts(residual_MO=hidden))


def launch(functions: str, plain: Mapping[str, Tensor], **inputs: Any) -> Tensor:
    return decode_layer(chosen() if functions == "chosen" else launchers(), **inputs)


def define(functions: str, plain: Mapping[str, Tensor], **inputs: Any) -> Tensor:
    return decode_layer(references(), **inputs)


def eager(
    x_BD: Tensor,
    norms: Mapping[str, Tensor],
    plain: Mapping[str, Tensor],
    angles: tuple[Tensor, Tensor],
    pages: Pages,
    spec: AttentionSpec,
    **_: Any,
) -> Tensor:
    """torch's own ops in 16 bits, over K and V that lie together instead of in pages."""
    batch, head_dim, num_kv_heads = len(x_BD), pages.k_pages.shape[3], pages.k_pages.shape[1]
    normed = functional.rms_norm(x_BD, x_BD.shape[-1:], norms["attention"], EPS)
    heads = functional.linear(normed, plain["qkv"]).view(batch, -1, head_dim)
    q, k, v = heads.split((heads.shape[1] - 2 * num_kv_heads, num_kv_heads, num_kv_heads), dim=1)
    k_all, v_all = contiguous_pages(pages, batch, x_BD.dtype)
    k_all[:, :, -1], v_all[:, :, -1] = turn(k, *angles), v
    q = turn(q, *angles).unsqueeze(2)
    attended = functional.scaled_dot_product_attention(
        q, k_all, v_all, scale=spec.scale, enable_gqa=True
    )
    hidden = x_BD + functional.linear(attended.reshape(batch, -1), plain["o"])
    normed = functional.rms_norm(hidden, hidden.shape[-1:], norms["mlp"], EPS)
    gate, up = functional.linear(normed, plain["gate_up"]).chunk(2, dim=-1)
    return hidden + functional.linear(functional.silu(gate) * up, plain["down"])


def turn(x_BNH: Tensor, cos_BA: Tensor, sin_BA: Tensor) -> Tensor:
    """The rotary embedding as models in plain torch have it."""
    cos, sin = (torch.cat((x, x), -1).to(x_BNH.dtype).unsqueeze(1) for x in (cos_BA, sin_BA))
    first, second = x_BNH.chunk(2, dim=-1)
    return x_BNH * cos + torch.cat((-second, first), -1) * sin


def cost(
    x_BD: Tensor,
    norms: Mapping[str, Tensor],
    weights: Mapping[str, LayerWeight],
    plain: Mapping[str, Tensor],
    angles: tuple[Tensor, Tensor],
    pages: Pages,
    tables: PageTables,
    **_: Any,
) -> OpCost:
    """Weights, keys and values are read once; x, the output and the new K and V are small."""
    held = [t for weight in weights.values() for t in weight if t is not None]
    read = sum(t.nbytes for t in (*held, *norms.values(), x_BD, *angles))
    kv_size = pages.k_pages.shape[1] * pages.k_pages.shape[3]
    token_bytes = 2 * kv_size * pages.k_pages.element_size()  # K and V
    batch, num_tokens = len(x_BD), int(tables.lengths.sum())
    elements = sum(weight.numel() for weight in plain.values())  # as many, whatever their form
    heads_size = plain["o"].shape[1]
    return OpCost(
        read + num_tokens * token_bytes,
        x_BD.nbytes + batch * token_bytes,
        2.0 * batch * elements + 4.0 * heads_size * num_tokens,
        "bf16",
    )


def make(
    shape: LayerShape,
    lengths: tuple[int, ...],
    form: str,
    functions: str,
    page_size: int,
    device: torch.device,
    generator: torch.Generator,
) -> OpInputs:
    """`form` is of the weights: bf16, fp8 or int8 (a scale a row), or int4 (groups of 128)."""
    batch, half = len(lengths), shape.head_dim // 2
    draw = partial(normal, dtype=BF16, device=device, generator=generator)
    plain = {name: draw(size, scale=size[1] ** -0.5) for name, size in shape.projections.items()}
    weights = {name: LayerWeight(values) for name, values in plain.items()}
    if form != "bf16":
        made = MADE[form]
        for name, size in shape.projections.items():
            result = make_weight(made, *size, BF16, device, generator)
            weights[name] = LayerWeight(result["weight"], result["weight_scale"])
    angles = torch.rand(batch, half, device=device, generator=generator) * 6.3
    # No page to spare: the baseline reads all of them.
    cache = random_cache(
        lengths, shape.num_kv_heads, shape.head_dim, page_size, BF16, device, generator, 0
    )
    tables = cache["tables"]._replace(max_length=max(lengths))
    return {
        "functions": functions,
        "x_BD": draw((batch, shape.hidden_size)),
        "norms": {
            name: 1.0 + draw((shape.hidden_size,), scale=0.1) for name in ("attention", "mlp")
        },
        "weights": weights,
        "plain": plain,
        "angles": (angles.cos(), angles.sin()),
        "slots_B": newest_slots(tables, page_size),
        "spec": AttentionSpec(shape.head_dim**-0.5),
        "pages": cache["pages"],
        "tables": tables,
    }


def case(
    batch: int,
    context: int,
    form: str = "bf16",
    functions: str = "launchers",
    shape: LayerShape | None = None,
    page_size: int = 64,
) -> Case:
    """`context` counts the new token; `functions` are our launchers, or what is chosen."""
    shape = shape or LayerShape()
    dtype_name = {"fp8": "fp8_e4m3 rows", "int8": "int8 rows", "int4": "int4 g128"}.get(form, form)
    # Each of five kernels rounds its result, attention also q, and int4 the sum of each group.
    return Case(
        label(f"{batch}x{context}", dtype_name, functions == "chosen" and "as chosen"),
        partial(make, shape, (context,) * batch, form, functions, page_size),
        BF16,
        shape.mlp_size,
        roundings=8,
    )


TINY = LayerShape(128, 2, 1, 64, 256)
FORMS = ("bf16", "fp8", "int8", "int4")

OP = Op(
    name="decode_layer",
    reference=define,
    launch=launch,
    cost=cost,
    summary="A decode step through a layer of Llama-3.1-8B's shape, in five kernels",
    small_cases=[
        case(batch, 20, form, "launchers", TINY, 16)
        for batch, form in [(1, "bf16"), (3, "bf16"), (1, "fp8"), (1, "int8"), (3, "int4")]
    ],
    cases=[
        case(batch, 1000, form, functions)
        for batch in (1, 16)
        for form in FORMS
        for functions in ("launchers", "chosen")
    ],
    bench_cases=[
        case(batch, 1024, form, functions)
        for batch in (1, 16)
        for form in FORMS
        for functions in ("launchers", "chosen")
    ],
    compile_cases=[],
    baselines={"eager": eager},
    supports=has_floats_of,
)
