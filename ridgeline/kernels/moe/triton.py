"""Mixture of experts in Triton: routing, a sort of the tokens by expert, grouped products, a sum.

`route_kernel` picks each token's experts. A (token, place among its experts) pair is a *slot*;
slots are sorted by expert with a counting sort in three small kernels: how many of each chunk of
slots go to each expert, where they begin, and the sorted list itself, always in the same order. The
grouped products then walk over blocks of rows of one expert: which expert and which rows a program
has it reads from the experts' starts, so the host never learns how many there are, and a captured
graph stays valid. A grid is as large as the worst case needs; programs too many end at once.

Gate and up are one kernel with the activation at its end; down writes each slot's row to a place of
its own, and `combine_kernel` adds a token's rows, weighted, in the order of its experts: no atomic
sums, so a result never depends on who came first.

Letters: T tokens, A experts a token goes through, N = T·A slots, E experts, D hidden, F expert MLP.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ridgeline.errors import UnsupportedError
from ridgeline.kernels.gated_activation.activations import gate_shares
from ridgeline.kernels.gated_activation.reference import Activation
from ridgeline.kernels.launch import launch, target_of
from ridgeline.kernels.targets import Target

MAX_EXPERTS = 512
CHUNK = 128  # slots a program of the sort takes: their ranks come from all pairs of them
CHUNKS = 32  # chunks the middle kernel of the sort adds up at once


@triton.jit
def route_kernel(
    logits_ptr,
    weights_ptr,
    experts_ptr,
    logits_stride,
    num_tokens,
    num_experts,
    PER_TOKEN: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    RANKS: tl.constexpr,
    ROWS: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # int64: offsets pass 2^31
    experts = tl.arange(0, EXPERTS)
    live = rows < num_tokens
    keep = live[:, None] & (experts < num_experts)[None, :]
    place = rows[:, None] * logits_stride + experts[None, :]
    logits = tl.load(logits_ptr + place, mask=keep, other=float("-inf")).to(tl.float32)
    largest = tl.maximum(tl.max(logits, axis=1), -3.0e38)  # rows past the end are all -inf
    weight = tl.exp(logits - largest[:, None])  # [ROWS, EXPERTS]
    scale = tl.sum(weight, axis=1)
    left = tl.where(keep, weight, -1.0)  # what can still be chosen
    ranks = tl.arange(0, RANKS)
    values = tl.zeros((ROWS, RANKS), tl.float32)
    for rank in tl.static_range(PER_TOKEN):
        # The first of equals. With NaN among the logits any could come out: an expert all the same.
        best = tl.minimum(tl.argmax(left, axis=1), num_experts - 1)
        values = tl.where(ranks[None, :] == rank, tl.max(left, axis=1)[:, None], values)
        left = tl.where(experts[None, :] == best[:, None], -1.0, left)
        tl.store(experts_ptr + rows * PER_TOKEN + rank, best.to(tl.int64), mask=live)
    if RENORMALIZE:
        scale = tl.sum(values, axis=1)
    place = rows[:, None] * PER_TOKEN + ranks[None, :]
    keep = live[:, None] & (ranks < PER_TOKEN)[None, :]
    tl.store(weights_ptr + place, values / tl.where(live, scale, 1.0)[:, None], mask=keep)


def route(logits_TE: Tensor, experts_per_token: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    """The launcher; arguments and results are reference.py's."""
    num_tokens, num_experts = logits_TE.shape
    _check_experts(num_experts)
    logits = logits_TE if logits_TE.stride(-1) == 1 else logits_TE.contiguous()
    shape = (num_tokens, experts_per_token)
    weights_TA = torch.empty(shape, dtype=torch.float32, device=logits.device)
    experts_TA = torch.empty(shape, dtype=torch.int64, device=logits.device)
    if num_tokens:
        padded = max(16, triton.next_power_of_2(num_experts))
        rows = max(1, 1024 // padded)
        launch(
            route_kernel,
            (triton.cdiv(num_tokens, rows),),
            (logits, weights_TA, experts_TA, logits.stride(0), num_tokens, num_experts),
            PER_TOKEN=experts_per_token,
            RENORMALIZE=renormalize,
            RANKS=triton.next_power_of_2(experts_per_token),
            ROWS=rows,
            EXPERTS=padded,
            num_warps=4,
        )
    return weights_TA, experts_TA


@triton.jit
def count_kernel(
    experts_ptr, counts_ptr, num_slots, num_experts, CHUNK: tl.constexpr, EXPERTS: tl.constexpr
):
    """counts[chunk, expert]: how many slots of the chunk go there."""
    chunk = tl.program_id(0).to(tl.int64)
    slots = chunk * CHUNK + tl.arange(0, CHUNK)
    chosen = tl.load(experts_ptr + slots, mask=slots < num_slots, other=num_experts).to(tl.int32)
    experts = tl.arange(0, EXPERTS)
    counts = tl.sum((chosen[:, None] == experts[None, :]).to(tl.int32), axis=0)
    tl.store(counts_ptr + chunk * num_experts + experts, counts, mask=experts < num_experts)


@triton.jit
def start_kernel(
    counts_ptr,
    start_ptr,
    num_chunks,
    num_experts,
    num_slots,
    CHUNKS: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    """Counts become places: where each chunk's slots of an expert begin in the sorted list, and
    start[expert], where the expert's own begin (start[num_experts] is the number of slots).
    """
    experts = tl.arange(0, EXPERTS)
    in_row = experts < num_experts
    total = tl.zeros((EXPERTS,), tl.int32)
    for first in range(0, num_chunks, CHUNKS):
        chunks = first + tl.arange(0, CHUNKS)
        keep = (chunks < num_chunks)[:, None] & in_row[None, :]
        place = chunks[:, None] * num_experts + experts[None, :]
        total += tl.sum(tl.load(counts_ptr + place, mask=keep, other=0), axis=0)
    begin = tl.cumsum(total, axis=0) - total
    tl.store(start_ptr + experts, begin, mask=in_row)
    tl.store(start_ptr + num_experts, num_slots)
    for first in range(0, num_chunks, CHUNKS):
        chunks = first + tl.arange(0, CHUNKS)
        keep = (chunks < num_chunks)[:, None] & in_row[None, :]
        place = chunks[:, None] * num_experts + experts[None, :]
        counts = tl.load(counts_ptr + place, mask=keep, other=0)
        tl.store(counts_ptr + place, begin[None, :] + tl.cumsum(counts, axis=0) - counts, mask=keep)
        begin += tl.sum(counts, axis=0)


@triton.jit
def place_kernel(experts_ptr, places_ptr, order_ptr, num_slots, num_experts, CHUNK: tl.constexpr):
    """order[place]: the slots, sorted by expert, within an expert as they came."""
    chunk = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, CHUNK)
    slots = chunk * CHUNK + lane
    live = slots < num_slots
    chosen = tl.load(experts_ptr + slots, mask=live, other=num_experts).to(tl.int32)
    # The same experts as a row: a second load is cheaper than turning a block around.
    others = tl.load(experts_ptr + slots, mask=live, other=num_experts).to(tl.int32)
    same = (chosen[:, None] == others[None, :]) & (lane[None, :] < lane[:, None])
    rank = tl.sum(same.to(tl.int32), axis=1)
    begin = tl.load(places_ptr + chunk * num_experts + chosen, mask=live, other=0)
    tl.store(order_ptr + begin + rank, slots.to(tl.int32), mask=live)


def sort_slots(experts_TA: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """The slots sorted by expert [N] and where each expert's begin [E + 1], both int32."""
    _check_experts(num_experts)
    experts = experts_TA.reshape(-1).contiguous()
    num_slots, device = experts.numel(), experts.device
    num_chunks = triton.cdiv(num_slots, CHUNK)
    padded = max(16, triton.next_power_of_2(num_experts))
    counts_CE = torch.empty(num_chunks, num_experts, dtype=torch.int32, device=device)
    start_E1 = torch.empty(num_experts + 1, dtype=torch.int32, device=device)
    order_N = torch.empty(num_slots, dtype=torch.int32, device=device)
    sizes = (num_slots, num_experts)
    launch(
        count_kernel,
        (num_chunks,),
        (experts, counts_CE, *sizes),
        CHUNK=CHUNK,
        EXPERTS=padded,
        num_warps=8,
    )
    launch(
        start_kernel,
        (1,),
        (counts_CE, start_E1, num_chunks, num_experts, num_slots),
        CHUNKS=CHUNKS,
        EXPERTS=padded,
        num_warps=8,
    )
    launch(
        place_kernel, (num_chunks,), (experts, counts_CE, order_N, *sizes), CHUNK=CHUNK, num_warps=8
    )
    return order_N, start_E1


@triton.jit
def block_of(
    start_ptr,
    num_experts,
    num_blocks,
    num_tiles,
    EXPERTS: tl.constexpr,
    BM: tl.constexpr,
    TOGETHER: tl.constexpr,
):
    """Which expert, which of its rows (places in the sorted list) and which column tile a program
    has; `first` is at least `end` where there is nothing left to do.

    TOGETHER blocks of rows share each column tile of weights before the next: what is read again is
    then still in L2.
    """
    pid = tl.program_id(0)
    in_band = TOGETHER * num_tiles
    band = pid // in_band
    height = tl.minimum(num_blocks - band * TOGETHER, TOGETHER)
    block = band * TOGETHER + (pid % in_band) % height
    tile = (pid % in_band) // height
    experts = tl.arange(0, EXPERTS)
    in_row = experts < num_experts
    begin = tl.load(start_ptr + experts, mask=in_row, other=0)
    end = tl.load(start_ptr + experts + 1, mask=in_row, other=0)
    blocks = (end - begin + BM - 1) // BM
    last = tl.cumsum(blocks, axis=0)  # blocks up to and with each expert
    expert = tl.sum(((last <= block) & in_row).to(tl.int32), axis=0)
    mine = experts == expert
    before = tl.sum(tl.where(mine, last - blocks, 0), axis=0)
    first = tl.sum(tl.where(mine, begin, 0), axis=0) + (block - before) * BM
    return expert, first, tl.sum(tl.where(mine, end, 0), axis=0), tile


@triton.jit
def gate_up_kernel(
    x_ptr,
    weight_ptr,
    hidden_ptr,
    order_ptr,
    start_ptr,
    x_stride,
    per_token,
    num_experts,
    num_blocks,
    num_tiles,
    D,
    F,
    ACTIVATION: tl.constexpr,
    EXPERTS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    TOGETHER: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    """hidden[place, f] = act(x · gate) · (x · up), rows in sorted order."""
    expert, first, end, tile = block_of(
        start_ptr, num_experts, num_blocks, num_tiles, EXPERTS, BM, TOGETHER
    )
    if first < end:
        places = first + tl.arange(0, BM)
        live = places < end
        token = tl.load(order_ptr + places, mask=live, other=0) // per_token
        columns = tile * BN + tl.arange(0, BN)
        in_row = columns < F
        k = tl.arange(0, BK)
        # int64: a tensor of experts is longer than 2^31
        x_rows = x_ptr + token.to(tl.int64)[:, None] * x_stride + k[None, :]
        base = weight_ptr + tl.cast(expert, tl.int64) * (2 * F).to(tl.int64) * D
        gate_rows = base + columns.to(tl.int64)[:, None] * D + k[None, :]
        up_rows = gate_rows + F.to(tl.int64) * D
        gate = tl.zeros((BM, BN), tl.float32)
        up = tl.zeros((BM, BN), tl.float32)
        for start in range(0, D, BK):
            if EVEN_K:
                x = tl.load(x_rows + start, mask=live[:, None], other=0.0)
                w_gate = tl.load(gate_rows + start, mask=in_row[:, None], other=0.0)
                w_up = tl.load(up_rows + start, mask=in_row[:, None], other=0.0)
            else:
                in_k = (k + start < D)[None, :]
                x = tl.load(x_rows + start, mask=live[:, None] & in_k, other=0.0)
                w_gate = tl.load(gate_rows + start, mask=in_row[:, None] & in_k, other=0.0)
                w_up = tl.load(up_rows + start, mask=in_row[:, None] & in_k, other=0.0)
            gate = tl.dot(x, tl.trans(w_gate), gate, input_precision="ieee")
            up = tl.dot(x, tl.trans(w_up), up, input_precision="ieee")
        share, _ = gate_shares(gate, ACTIVATION)
        out = gate * share * up
        place = places.to(tl.int64)[:, None] * F + columns[None, :]
        keep = live[:, None] & in_row[None, :]
        # rounded to the weights' dtype: the next product's matrix units take nothing wider
        tl.store(hidden_ptr + place, out.to(hidden_ptr.dtype.element_ty), mask=keep)


@triton.jit
def down_kernel(
    hidden_ptr,
    weight_ptr,
    out_ptr,
    order_ptr,
    start_ptr,
    num_experts,
    num_blocks,
    num_tiles,
    D,
    F,
    EXPERTS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    TOGETHER: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    """out[slot, d] = hidden[place] · down, each slot's row to its own place."""
    expert, first, end, tile = block_of(
        start_ptr, num_experts, num_blocks, num_tiles, EXPERTS, BM, TOGETHER
    )
    if first < end:
        places = first + tl.arange(0, BM)
        live = places < end
        slots = tl.load(order_ptr + places, mask=live, other=0)
        columns = tile * BN + tl.arange(0, BN)
        in_row = columns < D
        k = tl.arange(0, BK)
        # int64: a tensor of experts is longer than 2^31
        hidden_rows = hidden_ptr + places.to(tl.int64)[:, None] * F + k[None, :]
        base = weight_ptr + tl.cast(expert, tl.int64) * D.to(tl.int64) * F
        weight_rows = base + columns.to(tl.int64)[:, None] * F + k[None, :]
        total = tl.zeros((BM, BN), tl.float32)
        for start in range(0, F, BK):
            if EVEN_K:
                hidden = tl.load(hidden_rows + start, mask=live[:, None], other=0.0)
                weight = tl.load(weight_rows + start, mask=in_row[:, None], other=0.0)
            else:
                in_k = (k + start < F)[None, :]
                hidden = tl.load(hidden_rows + start, mask=live[:, None] & in_k, other=0.0)
                weight = tl.load(weight_rows + start, mask=in_row[:, None] & in_k, other=0.0)
            total = tl.dot(hidden, tl.trans(weight), total, input_precision="ieee")
        place = slots.to(tl.int64)[:, None] * D + columns[None, :]
        keep = live[:, None] & in_row[None, :]
        # rounded to the model's dtype, as one linear layer's output is: half the bytes to add up
        tl.store(out_ptr + place, total.to(out_ptr.dtype.element_ty), mask=keep)


@triton.jit
def combine_kernel(
    slots_ptr, weights_ptr, out_ptr, D, PER_TOKEN: tl.constexpr, BLOCK: tl.constexpr
):
    """out[token] = sum over its experts, in their order, of weight · row; in fp32."""
    token = tl.program_id(1).to(tl.int64)  # int64: offsets pass 2^31
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    keep = columns < D
    total = tl.zeros((BLOCK,), tl.float32)
    for rank in tl.static_range(PER_TOKEN):
        slot = token * PER_TOKEN + rank
        row = tl.load(slots_ptr + slot * D + columns, mask=keep, other=0.0)
        total += row.to(tl.float32) * tl.load(weights_ptr + slot)
    tl.store(out_ptr + token * D + columns, total.to(out_ptr.dtype.element_ty), mask=keep)


@dataclass(frozen=True)
class ExpertTiles:
    """Sizes of a grouped product's tiles: rows, columns, depth."""

    BM: int
    BN: int
    BK: int
    num_warps: int
    num_stages: int


def choose(rows_per_expert: float, paired: bool, dtype: torch.dtype, target: Target) -> ExpertTiles:
    """Tiles for `rows_per_expert` rows on average; `paired` products hold two sums (gate and up).

    A heuristic until measured: few rows are bound by the weights' bytes, so small tiles make many
    programs and deep pipelines; many rows are bound by the matrix units, so large tiles.
    """
    if target.backend == "interpreter":
        return ExpertTiles(16, 32, 32, 4, 2)
    if dtype == torch.float32:  # no fast matrix units for it: correct, not tuned
        return ExpertTiles(32, 32, 32, 4, 2)
    amd = target.backend == "hip"  # 64 KB of LDS on gfx942
    if rows_per_expert <= 16:
        return ExpertTiles(16, 32 if paired else 64, 128, 4, 2 if amd else 4)
    if rows_per_expert <= 64:
        return ExpertTiles(64, 64 if paired else 128, 64, 4, 2 if amd else 4)
    if target.name.startswith(("sm_90", "sm_100")):
        return ExpertTiles(128, 128 if paired else 256, 64, 8, 3)
    # Matrix units that hold the sums in the same registers as all else: half of that, or it spills.
    return ExpertTiles(128, 64 if paired else 128, 64, 8, 2 if amd else 3)


def choose_fixed(
    rows_per_expert: float, paired: bool, dtype: torch.dtype, target: Target
) -> ExpertTiles:
    """Tiles between which an output's sum stays the same (see kernels/fixed_linear/tiles.py): on
    sm_90 those of 64 rows or more, which are one kind of instruction; elsewhere always the same.
    """
    if target.name == "sm_90" and dtype != torch.float32 and rows_per_expert <= 64:
        return choose(64, paired, dtype, target)
    return choose(float("inf"), paired, dtype, target)


def mixture_of_experts(
    x_TD: Tensor,
    weights_TA: Tensor,
    experts_TA: Tensor,
    gate_up_E2FD: Tensor,
    down_EDF: Tensor,
    activation: Activation,
    fixed: bool = False,
    is_part: bool = False,
) -> Tensor:
    """The launcher; arguments and result are reference.py's. Weights are contiguous, rows of x are
    contiguous in their last dim. With `fixed` a token's bits do not depend on the others'. Where
    these are a part of the experts (`is_part`), slots of expert E are sorted behind all others, and
    no block is made for them: their rows stay zero.
    """
    num_tokens, hidden_size = x_TD.shape
    num_experts, _, mlp_size = down_EDF.shape
    per_token = experts_TA.shape[1]
    out_TD = torch.empty(x_TD.shape, dtype=x_TD.dtype, device=x_TD.device)
    if not num_tokens:
        return out_TD
    x = x_TD if x_TD.stride(-1) == 1 else x_TD.contiguous()
    assert gate_up_E2FD.is_contiguous(), "gate_up is not contiguous"
    assert down_EDF.is_contiguous(), "down is not contiguous"
    order_N, start = sort_slots(experts_TA, num_experts + is_part)
    num_slots = num_tokens * per_token
    hidden_NF = torch.empty(num_slots, mlp_size, dtype=x.dtype, device=x.device)
    slots_ND = torch.empty(num_slots, hidden_size, dtype=x.dtype, device=x.device)
    if is_part:
        slots_ND.zero_()
    padded = max(16, triton.next_power_of_2(num_experts))
    target, rows = target_of(x), num_slots / num_experts

    select = choose_fixed if fixed else choose
    tiles = select(rows, True, x.dtype, target)
    num_blocks = num_slots // tiles.BM + min(num_experts, num_slots)  # the most there can be
    num_tiles = triton.cdiv(mlp_size, tiles.BN)
    sizes = (num_experts, num_blocks, num_tiles, hidden_size, mlp_size)
    launch(
        gate_up_kernel,
        (num_blocks * num_tiles,),
        (x, gate_up_E2FD, hidden_NF, order_N, start, x.stride(0), per_token, *sizes),
        ACTIVATION=activation,
        EXPERTS=padded,
        EVEN_K=hidden_size % tiles.BK == 0,
        options={"enable_fp_fusion": not fixed},
        **_constants(tiles),
    )
    tiles = select(rows, False, x.dtype, target)
    num_blocks = num_slots // tiles.BM + min(num_experts, num_slots)
    num_tiles = triton.cdiv(hidden_size, tiles.BN)
    sizes = (num_experts, num_blocks, num_tiles, hidden_size, mlp_size)
    launch(
        down_kernel,
        (num_blocks * num_tiles,),
        (hidden_NF, down_EDF, slots_ND, order_N, start, *sizes),
        EXPERTS=padded,
        EVEN_K=mlp_size % tiles.BK == 0,
        options={"enable_fp_fusion": not fixed},
        **_constants(tiles),
    )
    block = min(1024, triton.next_power_of_2(hidden_size))
    launch(
        combine_kernel,
        (triton.cdiv(hidden_size, block), num_tokens),
        (slots_ND, weights_TA.contiguous(), out_TD, hidden_size),
        PER_TOKEN=per_token,
        BLOCK=block,
        num_warps=4,
    )
    return out_TD


def _constants(tiles: ExpertTiles) -> dict[str, Any]:
    return {
        "BM": tiles.BM,
        "BN": tiles.BN,
        "BK": tiles.BK,
        "TOGETHER": 8,
        "num_warps": tiles.num_warps,
        "num_stages": tiles.num_stages,
    }


def _check_experts(num_experts: int) -> None:
    if num_experts > MAX_EXPERTS:
        raise UnsupportedError(f"{num_experts} experts are more than {MAX_EXPERTS}")
