"""The CPU kernels in C++ against their references, how they are built, and the engine with and
without them.
"""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import assert_exact, engine_for, prompts_of, tiny
from kernel_checks import check_forward, make_inputs, poisoned_memory
from torch import Tensor

from ridgeline.engine import Sampling
from ridgeline.engine.activations import peak
from ridgeline.engine.host_model import MANY_ROWS, HostLinear, HostNorm, on_host
from ridgeline.engine.host_sequences import HostSequences
from ridgeline.engine.paged import CpuSequences
from ridgeline.errors import UnsupportedError
from ridgeline.formats.scaling import LARGEST
from ridgeline.kernels import host_library
from ridgeline.kernels.attention import AttentionSpec
from ridgeline.kernels.gated_activation import cpu as gated_cpu
from ridgeline.kernels.op import Case
from ridgeline.kernels.prefill_attention import cpu as attention_cpu
from ridgeline.kernels.registry import get_op
from ridgeline.kernels.rms_norm import cpu as norm_cpu
from ridgeline.kernels.rotary_pages import cpu as rotary_cpu
from ridgeline.kernels.skinny_linear import cpu as linear_cpu
from ridgeline.kernels.skinny_linear import reference as linear_reference
from ridgeline.kernels.tolerance import check
from ridgeline.models import Transformer
from ridgeline.models.transformer import Linear
from ridgeline.recipe import Recipe

CPU = torch.device("cpu")
BF16 = torch.bfloat16
needs_compiler = pytest.mark.skipif(host_library.find_compiler() is None, reason="no C++ compiler")


@pytest.fixture(scope="module", autouse=True)
def built() -> bool:
    return host_library.find_compiler() is not None and host_library.prepare()


def norm(**inputs: Any) -> Any:
    return norm_cpu.rms_norm(**inputs)


def gated(gate_up_T2F: Tensor, activation: Any, **_: Any) -> Tensor:
    return gated_cpu.gated_activation(gate_up_T2F, activation)


def rotary(**inputs: Any) -> Any:
    inputs.pop("config", None)
    q_TNH = rotary_cpu.rotary_pages(**inputs)
    pages = (inputs["k_pages_PKSH"], inputs["v_pages_PKSH"])
    return q_TNH, *pages


def prefill(**inputs: Any) -> Tensor:
    known = {name: value for name, value in inputs.items() if name not in ("max_new", "config")}
    for name in ("starts", "page_table_BM", "lengths_B"):
        known[name] = known[name].int()
    return attention_cpu.prefill_attention(**known)


def decode(**inputs: Any) -> Tensor:
    """A step of single tokens is a step of prompts with one token each."""
    for name in ("max_length", "split_tokens", "config"):
        inputs.pop(name, None)
    q_TNH = inputs.pop("q_BNH")
    return prefill(q_TNH=q_TNH, starts=torch.arange(len(q_TNH) + 1), **inputs)


WAYS = {
    "rms_norm": norm,
    "gated_activation": gated,
    "prefill_attention": prefill,
    "decode_attention": decode,
}


def cases_of(name: str) -> list[Any]:
    """Those whose inputs the kernel takes: not the ways a GPU cuts it, not 8-bit results."""
    found = []
    for case in get_op(name).small_cases:
        inputs = make_inputs(case, CPU)
        odd = inputs.get("config") is not None or inputs.get("quantized") is not None
        if odd or "q_TNH" in inputs and "k_pages_PKSH" not in inputs:
            continue
        if any(isinstance(x, Tensor) and x.dtype == torch.float8_e4m3fnuz for x in inputs.values()):
            continue
        found.append(pytest.param(name, case, id=f"{name}-{case.label}"))
    return found


@needs_compiler
@pytest.mark.parametrize(("name", "case"), [case for name in WAYS for case in cases_of(name)])
@pytest.mark.parametrize("threads", [1, 3])
def test_kernels_are_their_references(name: str, case: Case, threads: int) -> None:
    """Odd sizes, strides, every dtype, NaN where no token lies and in fresh memory."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        check_forward(get_op(name), case, CPU, WAYS[name])
    finally:
        torch.set_num_threads(before)
