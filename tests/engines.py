"""Small engines for tests, and what the plain loop says they must give."""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tiny_models import save_model

from ridgeline.engine import Engine, Output, Sampling
from ridgeline.engine.naive import generate_samples
from ridgeline.models import ModelConfig, Transformer
from ridgeline.quantization import load_model
from ridgeline.quantization.choose import LayerChoice, measure_shape
from ridgeline.quantization.sizes import model_matrices
from ridgeline.recipe import KV, Limits, Recipe


@cache
def tiny(name: str, dtype: str = "fp32", device: str = "cpu") -> Transformer:
    """One of tests/tiny_models.py; nobody changes it."""
    with tempfile.TemporaryDirectory() as folder:
        save_model(name, Path(folder))
        return load_model(Path(folder), dtype=dtype, device=device)


def engine_for(
    model: Transformer,
    *,
    num_pages: int = 64,
    budget: int = 64,
    max_batch: int = 8,
    page_size: int = 16,
    prefix_cache: bool = True,
    kv_dtype: Any = "auto",
    **changes: Any,
) -> Engine:
    kv = KV(dtype=kv_dtype, page_size=page_size, prefix_cache=prefix_cache)
    limits = Limits(max_batch=max_batch, token_budget=budget)
    changes.setdefault("quantize_all", True)  # what is faster does not decide what is tested
    changes.setdefault("overlap", True)  # as on a GPU, where more can go wrong
    return Engine(model, Recipe(kv=kv, limits=limits, **changes), num_pages=num_pages)


def prompts_of(lengths: list[int], seed: int = 1, vocab_size: int = 131) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randint(3, vocab_size, (length,), generator=generator).tolist() for length in lengths
    ]


def naive_outputs(
    model: Transformer, prompt: list[int], sampling: Sampling, stop_ids: tuple[int, ...] = ()
) -> list[tuple[int, ...]]:
    """The tokens of each of a request's outputs."""
    return _naive(model, tuple(prompt), repr(sampling), stop_ids, Kept(sampling))


class Kept:
    """Passes a cache by: equal to every other, because the key next to it says what it is."""

    def __init__(self, sampling: Sampling) -> None:
        self.sampling = sampling

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Kept)

    def __hash__(self) -> int:
        return 0


@cache
def _naive(
    model: Transformer, prompt: tuple[int, ...], key: str, stop_ids: tuple[int, ...], kept: Kept
) -> list[tuple[int, ...]]:
    outputs = generate_samples(model, prompt, kept.sampling, stop_ids)
    return [tuple(chosen.token for chosen in output) for output in outputs]


def assert_exact(engine: Engine, prompts: list[list[int]], samplings: list[Sampling]) -> None:
    """All requests at once give what each of them gives alone."""
    outputs = engine.generate(prompts, samplings)
    for prompt, sampling, output in zip(prompts, samplings, outputs, strict=True):
        assert output.status == "finished", output.reason
        found = [completion.tokens for completion in output.completions]
        assert found == naive_outputs(engine.model, prompt, sampling)
    assert_idle(engine)


def assert_idle(engine: Engine) -> None:
    """Nothing is held by nobody."""
    while engine.has_work:
        engine.step()
    stats = engine.stats
    assert stats.num_pages_used == 0
    assert stats.num_waiting + stats.num_prefilling + stats.num_decoding == 0


def measure_shapes(config: ModelConfig, *how: Any, **options: Any) -> list[LayerChoice]:
    """`measure_shape` for each shape of a model's projections."""
    shapes = dict.fromkeys(model_matrices(config))
    return [measure_shape(shape, *how, **options) for shape in shapes]


def assert_only_these_failed(
    outputs: Sequence[Output],
    prompts: Sequence[list[int]],
    sampling: Sampling,
    wrong: Collection[int],
    reason: str = "",
) -> None:
    """Of tiny("llama-mha")'s outputs; all others are what the plain loop gives."""
    for index, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        if index in wrong:
            assert output.status == "failed"
            assert reason in output.reason
        else:
            assert output.status == "finished", output.reason
            assert [output.tokens] == naive_outputs(tiny("llama-mha"), prompt, sampling)
