"""The activations inside kernels, in fp32, for every kernel that has one: reference.py's, from the
instructions the chips have.

`tl.exp` and a division look after denormals and cost four and seven instructions on NVIDIA's chips;
`tl.exp2` and `tl.rsqrt` are one each. So a sigmoid is a power of two, a reciprocal root and its
square, and the normal distribution's tail one power of two of a polynomial.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def activate(gate, KIND: tl.constexpr):
    """`act(gate)`: silu, gelu or gelu_tanh."""
    if KIND == "gelu":
        # max(x, 0) - |x| · tail(|x|): no large numbers that cancel. Past 8 the tail is nothing.
        size = tl.minimum(tl.abs(gate), 8.0)
        positive = tl.maximum(gate, 0.0, propagate_nan=tl.PropagateNan.ALL)
        result = positive - size * normal_tail(size)
    else:  # a power that overflows gives 0, as it should
        root = tl.rsqrt(1.0 + tl.exp2(-log2_odds(gate, KIND)))
        result = gate * (root * root)
    return result


@triton.jit
def gate_shares(gate, KIND: tl.constexpr):
    """`act(gate) / gate`, the share of the gate that goes through, and the share that does not,
    each to its last digits: a slope multiplies the second, small one by large numbers.
    """
    if KIND == "gelu":
        tail = normal_tail(tl.minimum(tl.abs(gate), 8.0))
        share = tl.where(gate > 0.0, 1.0 - tail, tail)
        rest = 1.0 - share
    else:  # a power that does not overflow: its product with the share is one then, not NaN
        odds = tl.exp2(tl.minimum(-log2_odds(gate, KIND), 126.0))
        share = 1.0 / (1.0 + odds)
        rest = share * odds
    return share, rest


@triton.jit
def log2_odds(gate, KIND: tl.constexpr):
    """The exponent x of a share 1 / (1 + 2^-x): log2(e) · gate for silu. For gelu_tanh, since
    (1 + tanh(u)) / 2 is the sigmoid of 2u: log2(e) · 2 · sqrt(2 / pi) · (gate + 0.044715 gate³).
    """
    if KIND == "silu":
        exponent = 1.4426950408889634 * gate
    else:
        exponent = gate * (2.302208198144325 + 0.1029432395800235 * gate * gate)
    return exponent


@triton.jit
def gate_slope(gate, share, rest, KIND: tl.constexpr):
    """The derivative of `act` at gate, with the shares of `gate_shares`."""
    if KIND == "silu":
        slope = share * (1.0 + gate * rest)
    elif KIND == "gelu":  # the density: 2^(-gate² · log2(e) / 2) / sqrt(2 pi)
        slope = share + gate * tl.exp2(-0.7213475204444817 * gate * gate) * 0.3989422804014327
    else:
        inner = 1.5957691216057308 + 3 * 0.0713548162726002 * gate * gate
        slope = share * (1.0 + gate * rest * inner)
    return slope


@triton.jit
def normal_tail(size):
    """The share of the normal distribution past `size`, from 0 to 8, to 4e-8.

    Its logarithm is smooth: a polynomial of degree 8, fitted to the smallest largest error of the
    share (7.5e-9; the rest is rounding). `tl.erf` needs two polynomials and a choice of each of
    their coefficients.
    """
    log = -2.7720564e-06 * size + 3.8620834e-05
    log = log * size - 0.00018254801
    log = log * size - 0.00014586911
    log = log * size + 0.0070754704
    log = log * size - 0.052505028
    log = log * size - 0.4592049
    log = log * size - 1.1511058
    return tl.exp2(log * size - 1.0)
