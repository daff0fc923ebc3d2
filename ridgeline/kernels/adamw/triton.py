"""AdamW in Triton: one pass over weights, gradients and moments of many tensors in one launch.

A table on the device has the addresses of each tensor's parts; a program takes a chunk of one
tensor. Every operation is rounded on its own (no multiply-add, roots and quotients to the nearest),
so that the bits are reference.py's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ridgeline.kernels.adamw.reference import FIRST_LEVELS, SECOND_LEVELS, SMALLEST_SCALE
from ridgeline.kernels.adamw.state import BLOCK, AdamWFormat, AdamWState, on_device
from ridgeline.kernels.launch import launch, target_of

CHUNK = 16384  # elements a program updates
TILE_BLOCKS = 8  # blocks of 256 elements that it holds at once. A heuristic until measured
COLUMNS = 9  # of the table of tensors


@triton.jit
def mixed(x):
    """reference.py's hash, on uint32."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def stochastic_bf16(value, drawn):
    bits = value.to(tl.int32, bitcast=True)
    finite = (bits & 0x7F800000) != 0x7F800000
    rounded = tl.where(finite, (bits + drawn.to(tl.int32)) & -65536, bits)
    return rounded.to(tl.float32, bitcast=True)


@triton.jit
def number(numbers_ptr, index: tl.constexpr):
    return tl.load(numbers_ptr + index).to(tl.float32, bitcast=True)


@triton.jit
def pointer(row_ptr, column: tl.constexpr, kind: tl.constexpr, start, ALIGNED: tl.constexpr):
    """To element `start` of the part of a tensor whose address stands in this column."""
    base = tl.load(row_ptr + column).to(tl.pointer_type(kind))
    if ALIGNED:
        base = tl.multiple_of(base, 16)
    return base + start


@triton.jit
def load(ptrs, keep, other, WHOLE: tl.constexpr):
    """Without a mask where a tile is whole: a mask of unknown width would cut the loads up."""
    if WHOLE:
        value = tl.load(ptrs)
    else:
        value = tl.load(ptrs, mask=keep, other=other)
    return value


@triton.jit
def store(ptrs, value, keep, WHOLE: tl.constexpr):
    if WHOLE:
        tl.store(ptrs, value)
    else:
        tl.store(ptrs, value, mask=keep)


@triton.jit
def block_scale(size, keep, SMALLEST: tl.constexpr):
    """The largest magnitude of each block of 256; NaN where a value is."""
    amax = tl.max(tl.where(keep, size, 0.0), axis=1, keep_dims=True)
    bad = tl.max(tl.where(keep & (size != size), 1, 0), axis=1, keep_dims=True)
    return tl.where(bad > 0, float("nan"), tl.maximum(amax, SMALLEST))


@triton.jit
def first_codes(value, scale, chance, LEVELS: tl.constexpr):
    share = tl.div_rn(tl.abs(value), scale) * (LEVELS * LEVELS)
    low = tl.floor(tl.sqrt_rn(share))
    way = tl.div_rn(share - low * low, 2.0 * low + 1.0)
    code = tl.minimum(low + tl.where(chance < way, 1.0, 0.0), LEVELS)
    code = tl.where(value < 0.0, -code, code)
    return tl.where(code == code, code, 0.0).to(tl.int32).to(tl.int8)


@triton.jit
def second_codes(value, scale, chance, LEVELS: tl.constexpr):
    MOST: tl.constexpr = LEVELS * LEVELS * LEVELS * LEVELS * 1.0
    share = tl.div_rn(value, scale) * MOST
    low = tl.floor(tl.sqrt_rn(tl.sqrt_rn(share)))
    here = low * low
    there = (low + 1.0) * (low + 1.0)
    here, there = here * here, there * there
    way = tl.div_rn(share - here, there - here)
    code = low + tl.where(chance < way, 1.0, 0.0)
    code = tl.minimum(tl.maximum(code, 1.0), LEVELS)
    code = tl.where((value > 0.0) & (share == share), code, 0.0)
    return code.to(tl.int32).to(tl.uint8)


@triton.jit
def update_tile(
    row_ptr,
    numbers_ptr,
    clip,
    base,
    start,
    num_elements,
    WEIGHT: tl.constexpr,
    GRAD: tl.constexpr,
    MOMENTS: tl.constexpr,
    EXACT: tl.constexpr,
    STOCHASTIC_WEIGHT: tl.constexpr,
    STOCHASTIC_MOMENTS: tl.constexpr,
    ALIGNED: tl.constexpr,
    WHOLE: tl.constexpr,
    TILE_BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    FIRST_LEVELS: tl.constexpr,
    SECOND_LEVELS: tl.constexpr,
    SMALLEST: tl.constexpr,
):
    """Elements from `start` on, in blocks of 256. Returns which updates were lost."""
    blocks = tl.arange(0, TILE_BLOCKS)[:, None]
    inner = blocks * BLOCK + tl.arange(0, BLOCK)[None, :]
    left = tl.minimum(num_elements - start, TILE_BLOCKS * BLOCK).to(tl.int32)
    keep = inner < left
    in_blocks = blocks * BLOCK < left
    beta1, rest1 = number(numbers_ptr, 0), number(numbers_ptr, 1)
    beta2, rest2 = number(numbers_ptr, 2), number(numbers_ptr, 3)
    eps, rate = number(numbers_ptr, 4), number(numbers_ptr, 5)
    kept, root = number(numbers_ptr, 6), number(numbers_ptr, 7)

    grad_ptrs = pointer(row_ptr, 2, GRAD, start, ALIGNED) + inner
    grad = load(grad_ptrs, keep, 0.0, WHOLE).to(tl.float32)
    if EXACT:
        weight_ptrs = pointer(row_ptr, 0, tl.int16, start, ALIGNED) + inner
        rest_ptrs = pointer(row_ptr, 1, tl.int16, start, ALIGNED) + inner
        high = load(weight_ptrs, keep, 0, WHOLE).to(tl.int32) << 16
        bits = high + load(rest_ptrs, keep, 0, WHOLE).to(tl.int32)
        weight = bits.to(tl.float32, bitcast=True)
    else:
        weight_ptrs = pointer(row_ptr, 0, WEIGHT, start, ALIGNED) + inner
        weight = load(weight_ptrs, keep, 0.0, WHOLE).to(tl.float32)
    if MOMENTS == "8-bit":
        first_ptrs = pointer(row_ptr, 3, tl.int8, start, ALIGNED) + inner
        second_ptrs = pointer(row_ptr, 4, tl.uint8, start, ALIGNED) + inner
        first_scale_ptrs = pointer(row_ptr, 5, tl.float32, start // BLOCK, False) + blocks
        second_scale_ptrs = pointer(row_ptr, 6, tl.float32, start // BLOCK, False) + blocks
        code = load(first_ptrs, keep, 0, WHOLE).to(tl.float32)
        first = code * tl.abs(code) * (1.0 / (FIRST_LEVELS * FIRST_LEVELS))
        first = first * tl.load(first_scale_ptrs, mask=in_blocks, other=0.0)
        square = load(second_ptrs, keep, 0, WHOLE).to(tl.float32) * (1.0 / SECOND_LEVELS)
        square = square * square
        second = square * square * tl.load(second_scale_ptrs, mask=in_blocks, other=0.0)
    else:
        first_ptrs = pointer(row_ptr, 3, MOMENTS, start, ALIGNED) + inner
        second_ptrs = pointer(row_ptr, 4, MOMENTS, start, ALIGNED) + inner
        first = load(first_ptrs, keep, 0.0, WHOLE).to(tl.float32)
        second = load(second_ptrs, keep, 0.0, WHOLE).to(tl.float32)

    grad = grad * clip
    first = first * beta1 + grad * rest1
    second = second * beta2 + grad * grad * rest2
    update = tl.div_rn(first, tl.sqrt_rn(second) * root + eps) * rate
    after = weight * kept - update

    if STOCHASTIC_WEIGHT or STOCHASTIC_MOMENTS:
        one = mixed(start.to(tl.uint32) + inner.to(tl.uint32) + base)
        two = mixed(one + 0x9E3779B9)
    if MOMENTS == "8-bit":
        chance1 = tl.full((TILE_BLOCKS, BLOCK), 0.5, dtype=tl.float32)
        chance2 = chance1
        if STOCHASTIC_MOMENTS:
            chance1 = (one >> 16).to(tl.int32).to(tl.float32) * 1.52587890625e-05
            chance2 = (two & 0xFFFF).to(tl.int32).to(tl.float32) * 1.52587890625e-05
        scale1 = block_scale(tl.abs(first), keep, SMALLEST)
        scale2 = block_scale(tl.abs(second), keep, SMALLEST)
        tl.store(first_scale_ptrs, scale1, mask=in_blocks)
        tl.store(second_scale_ptrs, scale2, mask=in_blocks)
        store(first_ptrs, first_codes(first, scale1, chance1, FIRST_LEVELS), keep, WHOLE)
        store(second_ptrs, second_codes(second, scale2, chance2, SECOND_LEVELS), keep, WHOLE)
    else:
        if STOCHASTIC_MOMENTS:
            first = stochastic_bf16(first, one >> 16)
            second = stochastic_bf16(second, two & 0xFFFF)
        store(first_ptrs, first.to(MOMENTS), keep, WHOLE)
        store(second_ptrs, second.to(MOMENTS), keep, WHOLE)
    if EXACT:
        bits = after.to(tl.int32, bitcast=True)
        bits = tl.where(after == after, bits, 0x7FC00000)  # one NaN stands for all
        high = (bits + 0x8000) >> 16
        store(weight_ptrs, high.to(tl.int16), keep, WHOLE)
        store(rest_ptrs, (bits - (high << 16)).to(tl.int16), keep, WHOLE)
        stored = after
    else:
        if STOCHASTIC_WEIGHT:
            after = stochastic_bf16(after, one & 0xFFFF)
        rounded = after.to(WEIGHT)
        store(weight_ptrs, rounded, keep, WHOLE)
        stored = rounded.to(tl.float32)
    return tl.where(keep & (stored == weight) & (update != 0.0), 1, 0)


@triton.jit
def adamw_kernel(
    table_ptr,
    chunks_ptr,
    numbers_ptr,
    clip_ptr,
    lost_ptr,
    WEIGHT: tl.constexpr,
    GRAD: tl.constexpr,
    MOMENTS: tl.constexpr,
    EXACT: tl.constexpr,
    STOCHASTIC_WEIGHT: tl.constexpr,
    STOCHASTIC_MOMENTS: tl.constexpr,
    ALIGNED: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
    TILE_BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    FIRST_LEVELS: tl.constexpr,
    SECOND_LEVELS: tl.constexpr,
    SMALLEST: tl.constexpr,
):
    """A chunk of one tensor: whole tiles, then what is left of a tensor at its end."""
    TILE: tl.constexpr = TILE_BLOCKS * BLOCK
    program = tl.program_id(0)
    row_ptr = table_ptr + tl.load(chunks_ptr + 2 * program).to(tl.int64) * COLUMNS
    begin = tl.load(chunks_ptr + 2 * program + 1).to(tl.int64) * CHUNK
    num_elements = tl.load(row_ptr + 7)
    salt = tl.load(row_ptr + 8).to(tl.uint32)
    base = mixed(tl.load(numbers_ptr + 8).to(tl.uint32) + salt * 0x9E3779B9)
    clip = tl.load(clip_ptr)
    lost = tl.zeros((TILE_BLOCKS, BLOCK), dtype=tl.int32)
    end = tl.minimum(begin + CHUNK, num_elements)
    if (clip.to(tl.int32, bitcast=True) & 0x7F800000) == 0x7F800000:
        end = begin  # not finite: nothing changes
    num_whole = ((end - begin) // TILE).to(tl.int32)
    for tile in range(num_whole):
        lost += update_tile(
            row_ptr, numbers_ptr, clip, base, begin + tile * TILE, num_elements,
            WEIGHT, GRAD, MOMENTS, EXACT, STOCHASTIC_WEIGHT, STOCHASTIC_MOMENTS, ALIGNED, True,
            TILE_BLOCKS, BLOCK, FIRST_LEVELS, SECOND_LEVELS, SMALLEST,
        )  # fmt: skip
    if begin + num_whole * TILE < end:
        lost += update_tile(
            row_ptr, numbers_ptr, clip, base, begin + num_whole * TILE, num_elements,
            WEIGHT, GRAD, MOMENTS, EXACT, STOCHASTIC_WEIGHT, STOCHASTIC_MOMENTS, ALIGNED, False,
            TILE_BLOCKS, BLOCK, FIRST_LEVELS, SECOND_LEVELS, SMALLEST,
        )  # fmt: skip
    tl.store(lost_ptr + program, tl.sum(tl.sum(lost, axis=1), axis=0))


TRITON = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
}


@dataclass
class TensorTable:
    """TensorTable of one format that one launch updates, and where their parts lie."""

    states: Sequence[AdamWState]
    addresses: list[list[int]]
    table: Tensor  # [tensors, COLUMNS] int64
    chunks: Tensor  # [programs, 2] int32: tensor, chunk of it

    @property
    def format(self) -> AdamWFormat:
        return self.states[0].format


def tabulate(states: Sequence[AdamWState], grads: Sequence[Tensor]) -> TensorTable:
    device = states[0].weight.device
    rows = [addresses(state, grad) for state, grad in zip(states, grads, strict=True)]
    counts = torch.tensor([triton.cdiv(state.weight.numel(), CHUNK) for state in states])
    tensors = torch.repeat_interleave(torch.arange(len(states)), counts)
    starts = (counts.cumsum(0) - counts).repeat_interleave(counts)
    chunks = torch.stack((tensors, torch.arange(len(tensors)) - starts), dim=1)
    return TensorTable(
        states,
        rows,
        on_device(torch.tensor(rows), device),
        on_device(chunks.to(torch.int32).contiguous(), device),
    )


def addresses(state: AdamWState, grad: Tensor) -> list[int]:
    parts = (
        state.weight,
        state.remainder,
        grad,
        state.first,
        state.second,
        state.first_scale,
        state.second_scale,
    )
    return [
        *(0 if part is None else part.data_ptr() for part in parts),
        state.weight.numel(),
        state.salt,
    ]


def update(tensors: TensorTable, grad_dtype: torch.dtype, numbers: Tensor, clip: Tensor) -> Tensor:
    """One launch. Returns the count of lost updates of each program, int32."""
    format, num_programs = tensors.format, len(tensors.chunks)
    lost = torch.empty(num_programs, dtype=torch.int32, device=tensors.table.device)
    moments = {"fp32": tl.float32, "bf16": tl.bfloat16, "8-bit": "8-bit"}[format.moments]
    if num_programs:
        launch(
            adamw_kernel,
            (num_programs,),
            (tensors.table, tensors.chunks, numbers, clip, lost),
            WEIGHT=tl.float32 if format.weight == "fp32" else tl.bfloat16,
            GRAD=TRITON[grad_dtype],
            MOMENTS=moments,
            EXACT=format.weight == "exact",
            STOCHASTIC_WEIGHT=format.stochastic_weight,
            STOCHASTIC_MOMENTS=format.stochastic_moments and format.moments != "fp32",
            ALIGNED=all(part % 16 == 0 for row in tensors.addresses for part in row[:7]),
            COLUMNS=COLUMNS,
            CHUNK=CHUNK,
            TILE_BLOCKS=TILE_BLOCKS,
            BLOCK=BLOCK,
            FIRST_LEVELS=FIRST_LEVELS,
            SECOND_LEVELS=SECOND_LEVELS,
            SMALLEST=SMALLEST_SCALE,
            num_warps=TILE_BLOCKS * BLOCK // (8 * target_of(tensors.table).warp_size),
            options={"enable_fp_fusion": False},  # a multiply-add rounds once where two do here
        )
    return lost
