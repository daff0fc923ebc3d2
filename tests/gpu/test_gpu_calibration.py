"""Quantizing on a GPU: the same codes as on a CPU, an original on the host that says what it says
on the device, and an 8B model's blocks within their share of six minutes and of 24 GiB.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
from calibrated import outlier_model, token_batches
from engines import engine_for, prompts_of, tiny

from ridgeline.models.shapes import random_model
from ridgeline.quality.perplexity import chosen_logprobs
from ridgeline.quality.walked import Walked
from ridgeline.quantization.calibrating.calibration import quantize_model
from ridgeline.quantization.methods import Awq, Gptq, Method, SmoothQuant, SparseGpt
from ridgeline.quantization.scheme import Codes, parse_scheme

LAYERS, LAYERS_OF_8B = 2, 32
METHODS = [Gptq(), Awq(points=4), SmoothQuant(alpha=0.5), SparseGpt()]  # no near ties of alphas


@pytest.mark.parametrize("method", METHODS, ids=repr)
@pytest.mark.parametrize("experts", [0, 4])
def test_the_device_does_not_matter(method: Method, experts: int) -> None:
    """Sums in another order tip a few codes; the model stays on the host."""
    model, scheme = outlier_model(experts, layers=1), parse_scheme("int4-g32")
    here = dict(quantize_model(model, token_batches(), scheme, method, min_tokens=8).tensors())
    there = quantize_model(
        model, token_batches(), scheme, method, min_tokens=8, device="cuda", keep_on_host=True
    )
    found = dict(there.tensors())
    assert found.keys() == here.keys()
    for name, codes in found.items():
        expected = here[name]
        if isinstance(codes, Codes) and isinstance(expected, Codes):
            assert codes.values.device.type == "cpu"
            assert (codes.values == expected.values).float().mean() > 0.95, name
    assert model.embed.weight.device.type == "cpu"


@pytest.mark.parametrize("name", ["llama-tied", "gemma2", "qwen3-moe"])
def test_an_original_on_the_host_scores_as_the_engine_does(name: str) -> None:
    windows = [tuple(prompt) for prompt in prompts_of([100, 61, 2])]
    walked = Walked(tiny(name), windows, "cuda")
    engine = engine_for(tiny(name, device="cuda"))
    expected = engine.score(windows, chosen_logprobs)
    for rows, right in zip(walked.score(windows, [chosen_logprobs] * 3), expected, strict=True):
        torch.testing.assert_close(rows, right, atol=2e-3, rtol=1e-3)
    assert all(value.device.type == "cpu" for value in tiny(name).parameters())


@pytest.mark.parametrize("method", [Gptq(), Awq()], ids=repr)
def test_time_and_memory_of_an_8b_model(method: Method, alone: Callable[[], bool]) -> None:
    """65,536 tokens through two blocks; the weights lie on the host."""
    model = random_model("llama-3.1-8b", torch.bfloat16, "cuda", LAYERS).cpu()
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randint(0, 128256, (8, 512), generator=generator) for _ in range(16)]
    scheme = parse_scheme("int4-g128")
    quantize_model(model, batches[:1], scheme, method, device="cuda")  # what starts once
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    quantize_model(model, batches, scheme, method, device="cuda")
    torch.cuda.synchronize()
    taken_s = time.perf_counter() - start
    peak_gib = torch.cuda.max_memory_reserved() / 2**30
    print(f"{method.name}: {taken_s / LAYERS:.1f} s a layer, {peak_gib:.1f} GiB")
    if alone():
        assert taken_s / LAYERS * LAYERS_OF_8B < 360
    assert peak_gib < 24
