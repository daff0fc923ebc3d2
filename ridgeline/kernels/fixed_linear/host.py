"""The fixed product on a CPU, and other row-wise work whose results must not depend on the rows
beside them: torch does it, always on blocks of the same shape, whatever the batch.

Libraries choose how to sum by the shape of a call, so a call here always has a fixed number of rows
(`BLOCK`), the last block filled up with zeros. No library promises that a row's place in its block
does not matter: `block_for` tests it for each weight, and falls back to one row at a time, which
needs no such promise. Functions whose vectors and remainders round differently (torch's own SiLU)
are put together from those that do not; where a vector's other elements matter too (erf on ARM),
each element has vectors of its own (`alone`). The thread count must not change.

    block = block_for(weight_OD)
    y_MO = in_blocks(lambda rows_BD: linear(rows_BD, weight_OD), block, x_MD)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, partial

import torch
from torch import Tensor

from ridgeline.errors import UnsupportedError
from ridgeline.kernels.gated_activation import Activation
from ridgeline.products import linear

BLOCK = 16  # rows a product has: one row alone costs a CPU about as much in reading the weights
NUM_TRIED = 4096  # elements on which a function of single elements is tried
VECTOR = 32  # elements: a multiple of what torch's loops take at once, on any CPU


def in_blocks(function: Callable[..., Tensor], block: int, *rows: Tensor) -> Tensor:
    """`function` on blocks of rows, filled up with zeros; results one behind the other. What it
    makes of a row must depend on no other row.
    """
    count = rows[0].shape[0]
    results = [
        function(*(_filled(x[start : start + block], block) for x in rows))
        for start in range(0, count, block)
    ]
    if not results:
        return function(*(_filled(x, block) for x in rows))[:0]
    return (results[0] if len(results) == 1 else torch.cat(results))[:count]


def _filled(rows: Tensor, block: int) -> Tensor:
    """A block in memory of its own: where a slice begins may choose how it is summed too."""
    out = rows.new_zeros(block, *rows.shape[1:])
    out[: len(rows)] = rows
    return out


def block_for(weight_OD: Tensor) -> int:
    """How many rows a product with this weight may have: BLOCK where a row gives the same bits in
    each place, beside any others; else one.
    """
    return _block_for(tuple(weight_OD.shape), weight_OD.dtype, torch.get_num_threads())


@cache
def _block_for(shape: tuple[int, int], dtype: torch.dtype, num_threads: int) -> int:
    generator = torch.Generator().manual_seed(0)
    weight_OD = torch.randn(shape, generator=generator).to(dtype)
    row_D, *others = torch.randn(3, shape[1], generator=generator).to(dtype)
    results = []
    for other in (*others, torch.zeros_like(row_D)):
        for row in range(BLOCK):
            x_BD = other.repeat(BLOCK, 1)
            x_BD[row] = row_D
            results.append(linear(x_BD, weight_OD)[row].clone())
    return BLOCK if all(torch.equal(y, results[0]) for y in results) else 1


def activated(gate_up_T2F: Tensor, activation: Activation) -> Tensor:
    """kernels/gated_activation's definition, from functions that round alike in every place."""
    gate, up = gate_up_T2F.float().chunk(2, dim=-1)
    if activation == "silu":
        share = 1.0 / (1.0 + _of_elements(torch.exp)(-gate))
    elif activation == "gelu":
        share = 0.5 * (1.0 + _of_elements(torch.erf)(gate * math.sqrt(0.5)))
    else:
        inner = math.sqrt(2.0 / math.pi) * (gate + 0.044715 * (gate * gate * gate))
        share = 0.5 * (1.0 + _of_elements(torch.tanh)(inner))
    return (gate * share * up).to(gate_up_T2F.dtype)


def alone(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """A function of single elements, each of which fills vectors of its own. Every thread's share
    is whole vectors.
    """
    num_threads = torch.get_num_threads()
    padded = x.new_zeros(math.ceil(x.numel() / num_threads) * num_threads)
    padded[: x.numel()] = x.reshape(-1)
    made = function(padded.repeat_interleave(VECTOR)).view(-1, VECTOR)
    return made[: x.numel(), 0].reshape(x.shape)


def _of_elements(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """The function in a form that rounds alike in every place."""
    return _alike(function, torch.get_num_threads())


@cache
def _alike(function: Callable[[Tensor], Tensor], num_threads: int) -> Callable[[Tensor], Tensor]:
    for form in (function, partial(alone, function)):
        if _is_alike(form):
            return form
    raise UnsupportedError(
        f"torch.{function.__name__} rounds an element differently by its position on this CPU; "
        "deterministic needs a GPU here, or a torch built with MKL"
    )


def _is_alike(function: Callable[[Tensor], Tensor]) -> bool:
    x = torch.randn(NUM_TRIED, generator=torch.Generator().manual_seed(0)) * 4
    whole = function(x)
    parts = ((0, 1), (1, 17), (3, 100), (7, NUM_TRIED // 2))
    return all(
        torch.equal(function(x[start : start + count].clone()), whole[start : start + count])
        for start, count in parts
    )


def check_functions() -> None:
    """An error where this machine's exponentials depend on the place in a tensor."""
    for function in (torch.exp, torch.erf, torch.tanh):
        _of_elements(function)
