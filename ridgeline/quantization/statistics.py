"""What calibration learns about the inputs of each matrix of a block, in one pass over the data.

The sum of xᵀx determines a matrix's squared output error: for a change ΔW of the weights it is the
trace of ΔW (xᵀx) ΔWᵀ. So searches need no inputs, except where the inputs themselves are rounded:
for these a few rows are kept.

Matrices have our parameters' names inside the block: `attn.qkv.weight`, and `mlp.gate_up.3` for the
fourth expert's, which gets only the tokens routed to it. `mlp.router.weight` is watched too: it
gets all tokens.

Letters: T tokens, D depth (inputs of a matrix), O outputs, S sample rows.

    statistics = collect(block, walk)
    error_db(weight_OD, decoded_OD, statistics["attn.qkv.weight"], scheme)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ridgeline.formats.scaling import quantize_rows
from ridgeline.kernels.gated_activation import gated_activation
from ridgeline.kernels.moe import route
from ridgeline.models.transformer import Block, ExpertMLP, Linear, RMSNorm
from ridgeline.products import linear
from ridgeline.quantization.blocks import BlockWalk
from ridgeline.quantization.scheme import Scheme

SAMPLE_ROWS = 512
SILENT_DB = -200.0  # stands for no error at all: far below what fp32 resolves


class Statistics:
    """Sums over the inputs of one matrix."""

    def __init__(self, depth: int, device: torch.device, rows_a_call: int = SAMPLE_ROWS) -> None:
        self.num_tokens = 0
        self.hessian_DD = torch.zeros(depth, depth, device=device)  # sum of xᵀx
        self.sum_D = torch.zeros(depth, device=device)  # of magnitudes
        self.amax_D = torch.zeros(depth, device=device)
        self.samples: list[Tensor] = []
        self.rows_a_call = rows_a_call

    def add(self, x_TD: Tensor) -> None:
        if not len(x_TD):
            return
        x_TD = x_TD.float()
        self.num_tokens += len(x_TD)
        self.hessian_DD.addmm_(x_TD.t(), x_TD)
        magnitude_TD = x_TD.abs()
        self.sum_D += magnitude_TD.sum(0)
        torch.maximum(self.amax_D, magnitude_TD.amax(0), out=self.amax_D)
        room = SAMPLE_ROWS - sum(len(rows) for rows in self.samples)
        count = min(room, self.rows_a_call, len(x_TD))
        if count > 0:
            self.samples.append(x_TD[:: len(x_TD) // count][:count].clone())

    @property
    def sample_SD(self) -> Tensor:
        return torch.cat(self.samples) if self.samples else self.sum_D.new_zeros(0, len(self.sum_D))

    def divide(self, scale_D: Tensor) -> None:
        """Account for inputs that are now smaller by these factors."""
        self.hessian_DD /= scale_D.outer(scale_D)
        self.sum_D /= scale_D
        self.amax_D /= scale_D
        self.samples = [rows / scale_D for rows in self.samples]


def collect(
    block: Block,
    walk: BlockWalk,
    on_batch: Callable[[], None] = lambda: None,
    *,
    advance: bool = False,
) -> dict[str, Statistics]:
    """Run the data through the block and collect statistics of its matrices' inputs. With
    `advance`, the outputs become the next block's inputs.
    """
    rows_a_call = -(-SAMPLE_ROWS // walk.num_batches)
    statistics = {
        name: Statistics(weight.shape[1], walk.device, rows_a_call)
        for name, weight in {**matrices(block), **_router(block)}.items()
    }
    with _watching(block, statistics):
        if advance:
            walk.advance(block, on_batch)
        else:
            for _ in walk.run(block):
                on_batch()
    return statistics


def matrices(block: Block) -> dict[str, Tensor]:
    """The weights that can be quantized, [O, D] each, as views of the block's own."""
    mlp = block.mlp
    weights: dict[str, Tensor] = {
        "attn.qkv.weight": block.attn.qkv.weight,
        "attn.out.weight": block.attn.out.weight,
    }
    if not isinstance(mlp, ExpertMLP):
        return weights | {
            "mlp.gate_up.weight": mlp.gate_up.weight,
            "mlp.down.weight": mlp.down.weight,
        }
    for expert in range(mlp.gate_up.shape[0]):
        weights[f"mlp.gate_up.{expert}"] = mlp.gate_up[expert]
        weights[f"mlp.down.{expert}"] = mlp.down[expert]
    return weights


def _router(block: Block) -> dict[str, Tensor]:
    mlp = block.mlp
    return {"mlp.router.weight": mlp.router.weight} if isinstance(mlp, ExpertMLP) else {}


@contextmanager
def _watching(block: Block, statistics: dict[str, Statistics]) -> Iterator[None]:
    handles = []
    for name, module in block.named_modules():
        if isinstance(module, Linear) and f"{name}.weight" in statistics:
            watch = _watch_linear(statistics[f"{name}.weight"])
            handles.append(module.register_forward_pre_hook(watch, with_kwargs=True))
        if isinstance(module, ExpertMLP):
            handles.append(module.register_forward_pre_hook(_watch_experts(statistics)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _watch_linear(statistics: Statistics) -> Callable[..., None]:
    def watch(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        norm: RMSNorm | None = args[1] if len(args) > 1 else kwargs.get("norm")
        statistics.add(args[0] if norm is None else norm(args[0]))

    return watch


def _watch_experts(statistics: dict[str, Statistics]) -> Callable[..., None]:
    def watch(mlp: ExpertMLP, args: tuple[Any, ...]) -> None:
        x_TD, norm = args[0], args[1]
        x_TD = norm(x_TD)
        logits_TE = linear(x_TD, mlp.router.weight)
        _, experts_TA = route(logits_TE, mlp.experts_per_token, mlp.renormalize)
        for expert in experts_TA.unique().tolist():
            rows_TD = x_TD[(experts_TA == expert).any(-1)]
            statistics[f"mlp.gate_up.{expert}"].add(rows_TD)
            gate_up = linear(rows_TD, mlp.gate_up[expert])
            statistics[f"mlp.down.{expert}"].add(gated_activation(gate_up, mlp.activation))

    return watch


def squared_error(change_OD: Tensor, hessian_DD: Tensor) -> Tensor:
    """The sum over all tokens and outputs of (x ΔWᵀ)²."""
    return ((change_OD @ hessian_DD) * change_OD).sum()


def round_inputs(x_TD: Tensor, scheme: Scheme) -> Tensor:
    """Inputs as the kernels of a scheme round them: one scale per token."""
    if scheme.input_dtype is None:
        return x_TD
    codes, scale_T = quantize_rows(x_TD, scheme.input_dtype)
    return codes.float() * scale_T.unsqueeze(-1)


def error_db(
    weight_OD: Tensor, decoded_OD: Tensor, statistics: Statistics, scheme: Scheme | None
) -> float:
    """The squared error of the outputs relative to their squares, in decibels: -20 is one
    hundredth. Where inputs are rounded too it is measured on the sample, otherwise on all tokens.
    """
    if scheme is None or scheme.inputs == "16-bit":
        error = squared_error(decoded_OD - weight_OD, statistics.hessian_DD)
        power = squared_error(weight_OD, statistics.hessian_DD)
    else:
        x_SD = statistics.sample_SD
        right = x_SD @ weight_OD.t()
        error = (round_inputs(x_SD, scheme) @ decoded_OD.t() - right).square().sum()
        power = right.square().sum()
    ratio = float(error) / max(float(power), 1e-30)
    return max(10 * math.log10(ratio), SILENT_DB) if ratio > 0 else SILENT_DB
