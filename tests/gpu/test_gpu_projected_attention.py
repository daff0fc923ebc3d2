"""Norm, rotary embedding, page write and attention as one kernel on the GPU, step after step: the
tokens it writes are those it reads in the next one, through graphs too.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from engines import engine_for, prompts_of
from torch import Tensor

from ridgeline.engine import Sampling
from ridgeline.kernels.attention.decode_run import DecodeRun
from ridgeline.kernels.attention.inputs import newest_slots
from ridgeline.kernels.decode_attention.op import DecodeCase
from ridgeline.kernels.inputs import normal
from ridgeline.kernels.projected_attention import Apart, launched
from ridgeline.kernels.projected_attention.cuda import Clustered, unsupported
from ridgeline.kernels.projected_attention.op import ProjectedCase, fused, make
from ridgeline.kernels.projected_attention.triton import Fused
from ridgeline.kernels.tolerance import check
from ridgeline.models import build_model, fill_random
from ridgeline.models.shapes import describe_shape

CUDA = torch.device("cuda")
STEPS = 70  # over the ends of pages of 64 and of splits
START = (1, 60, 190, 0, 250, 505)  # tokens; the row without any stays a padded one


def sequences(**attention: Any) -> dict[str, Any]:
    """Caches with room for all steps, and the rows at their start."""
    given = replace(DecodeCase(tuple(n and n + STEPS for n in START)), **attention)
    inputs = make(ProjectedCase(given, normed=True), CUDA, torch.Generator(CUDA).manual_seed(0))
    lengths = torch.tensor(START, dtype=torch.int32, device=CUDA)
    longest = max(START) + STEPS
    inputs["tables"] = inputs["tables"]._replace(lengths=lengths, max_length=longest)
    return inputs


def advance(inputs: dict[str, Any], generator: torch.Generator) -> None:
    """The next token of every sequence: its projection, length and slot. In place."""
    lengths = inputs["tables"].lengths
    lengths += (lengths > 0).int()
    page_size = inputs["pages"].k_pages.shape[2]
    qkv, _, slots, _ = inputs["rows"]
    slots.copy_(newest_slots(inputs["tables"], page_size))
    qkv.copy_(normal(tuple(qkv.shape), qkv.dtype, CUDA, generator))


def pages_of(inputs: dict[str, Any]) -> list[Tensor]:
    return inputs["pages"].tensors()


WAYS: list[Any] = [Fused(64, 4, 2), Fused(64, 4, 2, 64), Clustered(8, 4, 1), Clustered(2, 8, 2)]


def attended(inputs: dict[str, Any], way: Any) -> Tensor:
    """By that one kernel; a test is skipped where it is not for these pages, or was not built."""
    if not isinstance(way, Clustered):
        return fused(**inputs | {"run": DecodeRun(config=way)})
    reason = unsupported(inputs["rows"].qkv, inputs["pages"])
    if reason is not None:
        pytest.skip(reason)
    return launched(**inputs | {"run": DecodeRun(settled=True, config=way)})


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("cache", [None, torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("window", [None, 1, 100])
def test_step_after_step_as_two_kernels(
    window: int | None, cache: torch.dtype | None, way: Any
) -> None:
    """From the same start the caches stay the same, and so do the results, in tolerance."""
    one, two = (sequences(window=window, cache=cache) for _ in range(2))
    draws = [torch.Generator(CUDA).manual_seed(1) for _ in range(2)]
    for _ in range(STEPS):
        advance(one, draws[0])
        advance(two, draws[1])
        found, expected = attended(one, way), launched(**two | {"run": DecodeRun(config=Apart())})
        # Codes on the edge of two may fall to either side, and stay in the cache.
        roundings = 1 if cache is None else 16
        check(found, expected, torch.bfloat16, 700, roundings)
    for ours, theirs in zip(pages_of(one), pages_of(two), strict=True):
        if ours.dtype == torch.float32:  # scales: sums of squares may be taken in another order
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0.0, equal_nan=True)
            continue
        differ = ours.float().nan_to_num(0.0) != theirs.float().nan_to_num(0.0)
        assert differ.float().mean() < 0.002
        assert torch.equal(ours.float().isnan(), theirs.float().isnan())


@pytest.mark.parametrize("way", WAYS)
def test_replayed_it_gives_the_same_bits(way: Any) -> None:
    """Several layers over one cache in a graph, many times: programs come in any order, and the
    sums are in one.
    """
    inputs = sequences()
    advance(inputs, torch.Generator(CUDA).manual_seed(1))
    expected = attended(inputs, way)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = [attended(inputs, way) for _ in range(8)]
    for _ in range(50):
        graph.replay()
    torch.cuda.synchronize()
    assert expected.isfinite().all()
    for out in found:
        assert torch.equal(out, expected)


@pytest.mark.parametrize("kv_dtype", ["bf16", "fp8"])
def test_the_engine_says_what_it_launches(kv_dtype: str) -> None:
    config = describe_shape("llama-3.2-1b", num_layers=2).config
    model = fill_random(build_model(config, torch.bfloat16, "cuda"))
    engine = engine_for(model, num_pages=100, kv_dtype=kv_dtype)
    prompts = prompts_of([20, 90], vocab_size=config.vocab_size)
    engine.generate(prompts, Sampling(max_tokens=12, ignore_eos=True))
    graphs = engine.runner.graphs
    assert graphs is not None
    decoding = [notes for key, notes in graphs.notes.items() if not key.shape.num_prompt_rows]
    assert decoding
    for notes in decoding:
        ops = {note.op for note in notes}
        apart = {"rotary_pages", "decode_attention"}
        assert ops & {"projected_attention", *apart} in (apart, {"projected_attention"})
        assert kv_dtype == "fp8" or "projected_attention" in ops  # of codes, what was measured
