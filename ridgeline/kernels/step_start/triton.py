"""The start of a step in Triton: a program for each token and one for each row's page table.

Lines of the embedding, of the page table and of the angles are contiguous; those of the first two
may lie apart. Nothing is computed but the product with the embedding's scale, so all results are
the reference's bit for bit.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ridgeline.kernels.launch import launch, target_of
from ridgeline.kernels.rotary.reference import Angles
from ridgeline.kernels.step_start.reference import EmbeddingTable, StepTokens, TableRows
from ridgeline.kernels.targets import can_wait

THREADS = 128  # of a program
MOST = 4096  # entries of a line that a program copies at once


@triton.jit
def copy_line(from_ptr, to_ptr, length, scale, SCALED: tl.constexpr, BLOCK: tl.constexpr):
    for start in range(0, length, BLOCK):
        places = start + tl.arange(0, BLOCK)
        values = tl.load(from_ptr + places, mask=places < length)
        if SCALED:  # in fp32: torch multiplies 16-bit numbers so, and rounds once
            values = (values.to(tl.float32) * scale).to(to_ptr.dtype.element_ty)
        tl.store(to_ptr + places, values, mask=places < length)


@triton.jit
def step_start_kernel(
    ids_ptr,
    sources_ptr,
    last_ptr,
    weight_ptr,
    positions_ptr,
    seats_ptr,
    table_ptr,
    cos_ptr,
    sin_ptr,
    x_ptr,
    rows_ptr,
    cos_out_ptr,
    sin_out_ptr,
    weight_stride,
    table_stride,
    num_tokens,
    hidden_size,
    num_pages,
    num_angles,
    scale,
    SCALED: tl.constexpr,
    ROPE: tl.constexpr,
    HIDDEN_BLOCK: tl.constexpr,
    PAGE_BLOCK: tl.constexpr,
    ANGLE_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Programs of tokens come first, those of rows behind them."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()  # before any load: the step before has just left its tokens
    program = tl.program_id(0).to(tl.int64)  # int64: offsets pass 2^31
    if program < num_tokens:
        source = tl.load(sources_ptr + program)
        token = tl.load(ids_ptr + program)
        sampled = tl.load(last_ptr + tl.maximum(source, 0))
        token = tl.where(source >= 0, sampled, token).to(tl.int64)
        line_ptr = weight_ptr + token * weight_stride
        copy_line(line_ptr, x_ptr + program * hidden_size, hidden_size, scale, SCALED, HIDDEN_BLOCK)
        if ROPE:
            start = tl.load(positions_ptr + program).to(tl.int64) * num_angles
            to = program * num_angles
            copy_line(cos_ptr + start, cos_out_ptr + to, num_angles, scale, False, ANGLE_BLOCK)
            copy_line(sin_ptr + start, sin_out_ptr + to, num_angles, scale, False, ANGLE_BLOCK)
    else:
        row = program - num_tokens
        pages_ptr = table_ptr + tl.load(seats_ptr + row).to(tl.int64) * table_stride
        copy_line(pages_ptr, rows_ptr + row * num_pages, num_pages, scale, False, PAGE_BLOCK)


def step_start(
    tokens: StepTokens, embedding: EmbeddingTable, rows: TableRows, angles: Angles | None = None
) -> tuple[Tensor, ...]:
    """The launcher; arguments and results are reference.py's."""
    (weight_VD, scale), (seats_B, table_SP) = embedding, rows
    assert weight_VD.stride(1) == 1, "entries of an embedding lie side by side"
    assert table_SP.stride(1) == 1, "pages of a sequence lie side by side"
    num_tokens, num_rows = len(tokens.ids), len(seats_B)
    hidden_size, num_pages = weight_VD.shape[1], table_SP.shape[1]
    num_angles = 0 if angles is None else angles[0].shape[1]
    outputs = [
        weight_VD.new_empty(num_tokens, hidden_size),
        table_SP.new_empty(num_rows, num_pages),
    ]
    tables = angles or ()
    for table in tables:
        assert table.is_contiguous(), "a table of angles is contiguous"
        outputs.append(table.new_empty(num_tokens, num_angles))
    if num_tokens + num_rows:
        waits = can_wait(target_of(weight_VD))
        launch(
            step_start_kernel,
            (num_tokens + num_rows,),
            (
                *(tokens.ids, tokens.sources, tokens.last, weight_VD),
                *(tokens.positions, seats_B, table_SP),
                *(tables or outputs[:2]),
                *outputs,
                *(() if tables else outputs[:2]),
                weight_VD.stride(0),
                table_SP.stride(0),
                num_tokens,
                hidden_size,
                num_pages,
                num_angles,
                scale,
            ),
            SCALED=scale != 1.0,
            ROPE=bool(tables),
            HIDDEN_BLOCK=_block(hidden_size),
            PAGE_BLOCK=_block(num_pages),
            ANGLE_BLOCK=_block(num_angles),
            PDL=waits,
            num_warps=THREADS // target_of(weight_VD).warp_size,
            options={"launch_pdl": True} if waits else {},
        )
    return tuple(outputs)


def _block(length: int) -> int:
    return max(16, min(MOST, triton.next_power_of_2(max(1, length))))
