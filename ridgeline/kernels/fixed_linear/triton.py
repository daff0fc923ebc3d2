"""The fixed product in Triton: `act(x @ weightᵀ + bias) + residual`, each output summed in one
order whatever the number of rows.

The depth is cut into pieces at fixed columns. Where there are few tiles, each piece is a program's
own, and the last one to finish adds the pieces up in their order (APART); where there are many, a
program walks from tile to tile and from piece to piece, and keeps the sum so far in a place of its
own in memory while the next piece is summed: two sums of a large tile would not fit in registers.
Both add the same numbers in the same order. Multiply-adds outside the matrix units are not fused
(`enable_fp_fusion`): which of them are would differ from tile to tile.

Layouts: rows of x, weight and residual contiguous in their last dim; bf16, fp16 or fp32, all alike.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ridgeline.errors import UnsupportedError
from ridgeline.kernels.fixed_linear.tile import Tile
from ridgeline.kernels.fixed_linear.tiles import FULL, PIECE, choose, num_programs
from ridgeline.kernels.fixed_linear.tune_space import tune_key, tuned
from ridgeline.kernels.gated_activation.activations import activate
from ridgeline.kernels.launch import launch, target_of
from ridgeline.kernels.rows import as_rows
from ridgeline.kernels.skinny_linear.cut import MAX_TILES, split_counters
from ridgeline.kernels.skinny_linear.fused import NOTHING_FUSED, FusedParts

MOST_HELD = 32  # sums a thread can hold together with what is added to them
BAND = 8  # blocks of rows that share each block of weights before the next: it is still in L2 then


@triton.jit
def place_of(tile, num_row_blocks, num_columns_blocks, BAND: tl.constexpr):
    """Which block of rows and which block of outputs a tile is."""
    in_band = BAND * num_columns_blocks
    band = tile // in_band
    height = tl.minimum(num_row_blocks - band * BAND, BAND)
    return band * BAND + (tile % in_band) % height, (tile % in_band) // height


@triton.jit
def sum_piece(
    x_ptrs,
    weight_ptrs,
    second_ptrs,
    in_rows,
    in_outputs,
    in_second,
    begin,
    end,
    PAIRED: tl.constexpr,
    EVEN_O: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """The products of columns begin … end - 1, summed in fp32 in the order of the columns; PAIRED:
    with two blocks of weights.
    """
    inner = tl.arange(0, BLOCK_K)[None, :]
    total = tl.zeros((BLOCK_M, BLOCK_O), dtype=tl.float32)
    second = tl.zeros((BLOCK_M, BLOCK_O), dtype=tl.float32)
    for k in range(begin, end, BLOCK_K):
        in_x = in_rows if EVEN_K else in_rows & (k + inner < end)
        x = tl.load(x_ptrs + k, mask=in_x, other=0.0)
        if EVEN_O and EVEN_K:
            weight = tl.load(weight_ptrs + k)
        else:
            weight = tl.load(weight_ptrs + k, mask=in_outputs & (k + inner < end), other=0.0)
        total = tl.dot(x, tl.trans(weight), total, input_precision="ieee")
        if PAIRED:
            if EVEN_O and EVEN_K:
                weight = tl.load(second_ptrs + k)
            else:
                weight = tl.load(second_ptrs + k, mask=in_second & (k + inner < end), other=0.0)
            second = tl.dot(x, tl.trans(weight), second, input_precision="ieee")
    return total, second


@triton.jit
def finish(
    total,
    up,
    rows,
    outputs,
    bias_ptr,
    residual_ptr,
    out_ptr,
    residual_stride,
    num_rows,
    num_outputs,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    """Bias, activation, residual, and the store of one tile."""
    in_outputs = outputs < num_outputs
    inside = (rows < num_rows)[:, None] & in_outputs[None, :]
    if HAS_BIAS:
        total += tl.load(bias_ptr + outputs, mask=in_outputs, other=0.0).to(tl.float32)[None, :]
    if ACTIVATION is not None:
        if HAS_BIAS:
            up_bias = tl.load(bias_ptr + num_outputs + outputs, mask=in_outputs, other=0.0)
            up += up_bias.to(tl.float32)[None, :]
        total = activate(total, ACTIVATION) * up
    row = rows.to(tl.int64)[:, None]  # int64: rows times a stride may pass 2^31
    if HAS_RESIDUAL:
        residual = residual_ptr + row * residual_stride + outputs[None, :]
        total += tl.load(residual, mask=inside, other=0.0).to(tl.float32)
    place = row * num_outputs + outputs[None, :]
    tl.store(out_ptr + place, total.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def finish_pair(
    total,
    second,
    rows,
    outputs,
    bias_ptr,
    residual_ptr,
    out_ptr,
    residual_stride,
    num_rows,
    num_outputs,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    ACTIVATION: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK_O: tl.constexpr,
):
    """One tile, or WIDE two that lie side by side."""
    finish(
        total, second, rows, outputs, bias_ptr, residual_ptr, out_ptr, residual_stride,
        num_rows, num_outputs, HAS_BIAS, HAS_RESIDUAL, ACTIVATION,
    )  # fmt: skip
    if WIDE:
        finish(
            second, second, rows, outputs + BLOCK_O, bias_ptr, residual_ptr, out_ptr,
            residual_stride, num_rows, num_outputs, HAS_BIAS, HAS_RESIDUAL, ACTIVATION,
        )  # fmt: skip


@triton.jit
def load_kept(kept_ptr, row, first, M: tl.constexpr, WIDTH: tl.constexpr, O: tl.constexpr):
    """M rows from `row` on and WIDTH columns from `first` on of a kept tile of O columns; `.cg`:
    other threads or SMs wrote it.
    """
    columns = first + tl.arange(0, WIDTH)
    place = (row + tl.arange(0, M))[:, None] * O + columns[None, :]
    return tl.load(kept_ptr + place, cache_modifier=".cg")


@triton.jit
def keep(total, kept_ptr, row, first, O: tl.constexpr):
    columns = first + tl.arange(0, total.shape[1])
    place = (row + tl.arange(0, total.shape[0]))[:, None] * O + columns[None, :]
    tl.store(kept_ptr + place, total)


@triton.jit
def halves(x):
    """The left and the right columns of a tile."""
    M: tl.constexpr = x.shape[0]
    O: tl.constexpr = x.shape[1]
    return tl.split(tl.permute(tl.reshape(x, (M, 2, O // 2)), (0, 2, 1)))


@triton.jit
def in_parts(x, PARTS: tl.constexpr):
    """A tile's columns in 1, 2 or 4 parts, from left to right."""
    if PARTS == 1:
        parts = (x,)
    elif PARTS == 2:
        parts = halves(x)
    else:
        left, right = halves(x)
        parts = halves(left) + halves(right)
    return parts


@triton.jit
def add_to(total, kept_ptr, piece, row, PARTS: tl.constexpr, O: tl.constexpr):
    """The sum so far plus this piece's, kept in its place."""
    M: tl.constexpr = total.shape[0]
    parts = in_parts(total, PARTS)
    for part in tl.static_range(PARTS):
        new = parts[part]
        if piece > 0:
            new = load_kept(kept_ptr, row, part * (O // PARTS), M, O // PARTS, O) + new
        tl.debug_barrier()  # every thread has read before any stores
        keep(new, kept_ptr, row, part * (O // PARTS), O)


@triton.jit
def add_pieces(
    base_ptr,
    first,
    num_pieces,
    M: tl.constexpr,
    WIDTH: tl.constexpr,
    O: tl.constexpr,
    SIZE: tl.constexpr,
):
    """All pieces' sums of WIDTH columns from `first` on, in the order of the pieces."""
    total = load_kept(base_ptr, 0, first, M, WIDTH, O)
    for piece in range(1, num_pieces):
        total += load_kept(base_ptr + piece * SIZE, 0, first, M, WIDTH, O)
    return total


@triton.jit
def fixed_linear_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    kept_ptr,
    counter_ptr,
    x_stride,
    weight_stride,
    residual_stride,
    num_rows,
    num_outputs,
    depth,
    num_tiles,
    num_pieces,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    ACTIVATION: tl.constexpr,
    EVEN_O: tl.constexpr,
    EVEN_K: tl.constexpr,
    APART: tl.constexpr,
    ONE_PIECE: tl.constexpr,
    PARTS: tl.constexpr,
    WIDE: tl.constexpr,
    PIECE: tl.constexpr,
    BAND: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Programs: tiles x pieces (APART), or as many as the chip holds, each with every so-manieth
    tile. What follows a sum is done in PARTS, some of its columns at a time, or it would spill;
    WIDE: a tile is two blocks of outputs side by side, for the same reason.
    """
    PAIRED: tl.constexpr = WIDE or ACTIVATION is not None
    SIZE: tl.constexpr = BLOCK_M * BLOCK_O * (2 if PAIRED else 1)  # numbers of one kept sum
    SECOND: tl.constexpr = BLOCK_M * BLOCK_O  # where the second of a pair is kept
    ACROSS: tl.constexpr = BLOCK_O * (2 if WIDE else 1)
    WIDTH: tl.constexpr = BLOCK_O // PARTS
    # One loop over the pieces of all its tiles: nested ones would hold more, and spill.
    num_mine = tl.cdiv(num_tiles - tl.program_id(0), tl.num_programs(0))
    for work in range(num_mine if APART or ONE_PIECE else num_mine * num_pieces):
        if APART:
            tile, piece = tl.program_id(0), tl.program_id(1)
        elif ONE_PIECE:
            tile, piece = tl.program_id(0) + work * tl.num_programs(0), 0
        else:
            tile = tl.program_id(0) + work // num_pieces * tl.num_programs(0)
            piece = work % num_pieces
        row_block, output_block = place_of(
            tile, tl.cdiv(num_rows, BLOCK_M), tl.cdiv(num_outputs, ACROSS), BAND
        )
        rows = row_block * BLOCK_M + tl.arange(0, BLOCK_M)
        outputs = output_block * ACROSS + tl.arange(0, BLOCK_O)
        inner = tl.arange(0, BLOCK_K)[None, :]
        # int64: a weight may have more than 2^31 elements.
        weight_ptrs = weight_ptr + outputs.to(tl.int64)[:, None] * weight_stride + inner
        apart = BLOCK_O if WIDE else num_outputs  # rows of weights between the two of a pair
        total, second = sum_piece(
            x_ptr + rows.to(tl.int64)[:, None] * x_stride + inner,
            weight_ptrs,
            weight_ptrs + tl.cast(apart, tl.int64) * weight_stride,
            (rows < num_rows)[:, None],
            (outputs < num_outputs)[:, None],
            (outputs + (BLOCK_O if WIDE else 0) < num_outputs)[:, None],
            piece * PIECE,
            tl.minimum(piece * PIECE + PIECE, depth),
            PAIRED, EVEN_O, EVEN_K, BLOCK_M, BLOCK_O, BLOCK_K,
        )  # fmt: skip
        columns = output_block * ACROSS + tl.arange(0, WIDTH)
        if ONE_PIECE:
            totals, seconds = in_parts(total, PARTS), in_parts(second, PARTS)
            for part in tl.static_range(PARTS):
                finish_pair(
                    totals[part], seconds[part], rows, columns + part * WIDTH, bias_ptr,
                    residual_ptr, out_ptr, residual_stride, num_rows, num_outputs,
                    HAS_BIAS, HAS_RESIDUAL, ACTIVATION, WIDE, BLOCK_O,
                )  # fmt: skip
        elif APART:
            base = kept_ptr + tl.cast(tile, tl.int64) * num_pieces * SIZE
            own = base + tl.cast(piece, tl.int64) * SIZE
            keep(total, own, 0, 0, BLOCK_O)
            if PAIRED:
                keep(second, own + SECOND, 0, 0, BLOCK_O)
            tl.debug_barrier()  # every thread has stored before one of them counts the program in
            arrived = tl.atomic_add(counter_ptr + tile, 1, sem="acq_rel", scope="gpu")
            if arrived == num_pieces - 1:
                tl.store(counter_ptr + tile, 0)  # as the next launch must find it
                for first in tl.static_range(0, BLOCK_O, WIDTH):
                    sums = add_pieces(base, first, num_pieces, BLOCK_M, WIDTH, BLOCK_O, SIZE)
                    others = sums
                    if PAIRED:
                        others = add_pieces(
                            base + SECOND, first, num_pieces, BLOCK_M, WIDTH, BLOCK_O, SIZE
                        )
                    finish_pair(
                        sums, others, rows, columns + first, bias_ptr, residual_ptr,
                        out_ptr, residual_stride, num_rows, num_outputs,
                        HAS_BIAS, HAS_RESIDUAL, ACTIVATION, WIDE, BLOCK_O,
                    )  # fmt: skip
        else:
            kept = kept_ptr + tl.program_id(0).to(tl.int64) * SIZE
            # Zero, which the compiler does not see: it would hold all addresses of the kept tile in
            # registers through the loop, and there are none left.
            zero = work // (1 << 30)
            add_to(total, kept, piece, zero, PARTS, BLOCK_O)
            if PAIRED:
                add_to(second, kept + SECOND, piece, zero, PARTS, BLOCK_O)
            tl.debug_barrier()  # every thread has stored before any reads
            if piece == num_pieces - 1:
                for first in tl.static_range(0, BLOCK_O, WIDTH):
                    sums = load_kept(kept, zero, first, BLOCK_M, WIDTH, BLOCK_O)
                    others = sums
                    if PAIRED:
                        others = load_kept(kept + SECOND, zero, first, BLOCK_M, WIDTH, BLOCK_O)
                    finish_pair(
                        sums, others, rows, columns + first, bias_ptr, residual_ptr,
                        out_ptr, residual_stride, num_rows, num_outputs,
                        HAS_BIAS, HAS_RESIDUAL, ACTIVATION, WIDE, BLOCK_O,
                    )  # fmt: skip
                tl.debug_barrier()  # every thread has read before any stores the next tile


def fixed_linear(
    x_MD: Tensor,
    weight_OD: Tensor,
    fused: FusedParts = NOTHING_FUSED,
    one_tile: bool = False,
    tile: Tile | None = None,
    piece: int = PIECE,
    apart: bool | None = None,
    out_MO: Tensor | None = None,
) -> Tensor:
    """The launcher; arguments and result are reference.py's. `tile` and `apart` are chosen where
    they are not given, and change no bit; `piece` does, and is only ever given by tests. The result
    is left in `out_MO`, where that is given: contiguous, of x's dtype.
    """
    _check(x_MD, weight_OD)
    assert fused.norm_weight_D is None, "a norm is not folded in"
    bias_O, residual_MO, activation = fused.bias_O, fused.residual_MO, fused.activation
    x_rows = as_rows(x_MD)
    num_rows, depth = x_rows.shape
    gated = activation is not None
    num_outputs = weight_OD.shape[0] // (2 if gated else 1)
    out = out_MO
    if out is None:
        out = torch.empty((*x_MD.shape[:-1], num_outputs), dtype=x_MD.dtype, device=x_MD.device)
    assert out.is_contiguous(), "the result must be contiguous"
    if not out.numel():
        return out
    residual = None if residual_MO is None else as_rows(residual_MO)
    target = target_of(x_MD)
    num_pieces = max(1, triton.cdiv(depth, piece))
    if tile is None and not one_tile:
        key = tune_key(num_rows, num_outputs, depth, gated, x_MD.dtype)
        tile = tuned(key, x_MD.device, target)
    if tile is None:
        tile = choose(num_rows, num_outputs, num_pieces, gated, x_MD.dtype, target, one_tile)
    assert piece % tile.block_k == 0, f"pieces of {piece} are not whole steps of {tile.block_k}"
    cut = _cut(tile, num_rows, num_outputs, num_pieces, target.num_units, apart)
    kept, counters = _workspace(cut, tile, num_pieces, gated, out)
    launch(
        fixed_linear_kernel,
        cut.grid,
        (
            x_rows,
            weight_OD,
            out if bias_O is None else bias_O,
            out if residual is None else residual,
            out,
            kept,
            counters,
            x_rows.stride(0),
            weight_OD.stride(0),
            0 if residual is None else residual.stride(0),
            num_rows,
            num_outputs,
            depth,
            cut.num_tiles,
            num_pieces,
        ),
        HAS_BIAS=bias_O is not None,
        HAS_RESIDUAL=residual is not None,
        ACTIVATION=activation,
        EVEN_O=num_outputs % tile.across == 0,
        EVEN_K=depth % tile.block_k == 0,
        APART=cut.apart,
        ONE_PIECE=num_pieces == 1,
        PARTS=_num_parts(tile, gated),
        WIDE=tile.wide,
        PIECE=piece,
        BAND=BAND,
        BLOCK_M=tile.block_m,
        BLOCK_O=tile.block_o,
        BLOCK_K=tile.block_k,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        options={"enable_fp_fusion": False},
    )
    return out


def _num_parts(tile: Tile, gated: bool) -> int:
    """Into how many parts a tile's sums are cut, so that a thread has room for what is added."""
    held = tile.num_sums(gated) // (32 * tile.num_warps)
    return 4 if held > 2 * MOST_HELD else 2 if held > MOST_HELD else 1


class FixedCut(NamedTuple):
    num_tiles: int
    apart: bool  # whether each piece is a program's own
    grid: tuple[int, int]


def _cut(
    tile: Tile,
    num_rows: int,
    num_outputs: int,
    num_pieces: int,
    num_units: int,
    apart: bool | None,
) -> FixedCut:
    num_tiles = num_programs(tile, num_rows, num_outputs)
    if apart is None:
        apart = num_tiles < FULL * num_units
    if apart and num_pieces > 1 and num_tiles <= MAX_TILES:
        return FixedCut(num_tiles, True, (num_tiles, num_pieces))
    # One piece: nothing is kept from one to the next, and the hardware hands out tiles as well.
    return FixedCut(
        num_tiles, False, (num_tiles if num_pieces == 1 else min(num_tiles, num_units), 1)
    )


def _workspace(
    cut: FixedCut, tile: Tile, num_pieces: int, gated: bool, out: Tensor
) -> tuple[Tensor, Tensor]:
    """Room for sums of pieces, and the counters of who has arrived; `out` stands in for none."""
    if num_pieces == 1:
        return out, out
    count = cut.num_tiles * num_pieces if cut.apart else cut.grid[0]
    kept = torch.empty(count * tile.num_sums(gated), dtype=torch.float32, device=out.device)
    return kept, split_counters(out.device) if cut.apart else out


def _check(x_MD: Tensor, weight_OD: Tensor) -> None:
    if x_MD.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise UnsupportedError(f"x is {x_MD.dtype}; it must be bf16, fp16 or fp32")
    if weight_OD.dtype != x_MD.dtype:
        raise UnsupportedError(
            f"x is {x_MD.dtype}, the weight {weight_OD.dtype}; they must have the same dtype"
        )
    if weight_OD.stride(1) != 1:
        raise UnsupportedError("the weight's rows are not contiguous; call .contiguous() once")
    assert weight_OD.shape[1] == x_MD.shape[-1], f"{x_MD.shape} times {weight_OD.shape}"
