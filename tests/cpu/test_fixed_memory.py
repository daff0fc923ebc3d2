"""What `deterministic` takes, in the plan: on a CPU against what its steps allocate, and for GPUs
against what the launchers ask for, with the launch itself left out.
"""

from __future__ import annotations

import gc
from functools import partial
from typing import Any

import pytest
import torch
from allocations import allocations
from test_memory_plan import recipe_for, small_config

from ridgeline.engine import Engine, Sampling
from ridgeline.engine.memory.fixed_activations import fixed_peak
from ridgeline.engine.memory.footprint import graph_bytes, step_peak
from ridgeline.engine.memory.plan import itemise
from ridgeline.formats.dtypes import parse_dtype
from ridgeline.kernels.attention import AttentionSpec
from ridgeline.kernels.deterministic_attention.splits import most_partial_bytes
from ridgeline.kernels.fixed_linear import host as cpu_fixed
from ridgeline.kernels.fixed_linear.tiles import most_kept_bytes
from ridgeline.kernels.pages import PageTables, make_pages
from ridgeline.kernels.prefill_attention import Packing
from ridgeline.kernels.targets import TARGETS
from ridgeline.models import build_model, fill_random
from ridgeline.models.shapes import describe_shape
from ridgeline.recipe import KV, Limits, Recipe, edited

GREEDY = Sampling(max_tokens=2, ignore_eos=True)
NARROW = {"intermediate_size": 64, "moe_intermediate_size": 64}
# Prompts, tokens a step, the shape, its dtype and changes to it, and what holds most.
CASES: dict[str, tuple[list[int], int, str, Any, dict[str, Any], str]] = {
    "MLP": ([200], 200, "llama-3.1-8b", "fp32", {}, "MLP"),
    "MLP in bf16": ([200], 200, "llama-3.1-8b", "bf16", {}, "MLP"),
    "gelu": ([200], 200, "gemma-2-9b", "fp32", {}, "MLP"),
    "experts": ([200], 200, "qwen3-30b-a3b", "fp32", {"moe_intermediate_size": 2048}, "experts"),
    "experts in bf16": ([200], 200, "mixtral-8x7b", "bf16", {"intermediate_size": 2048}, "experts"),
    "last chunk": ([576], 64, "llama-3.1-8b", "bf16", NARROW, "attention"),
    "window": ([576], 64, "gemma-3-1b", "fp32", NARROW | {"sliding_window": 100}, "attention"),
    "many items": ([1280], 256, "qwen3-8b", "fp32", NARROW, "attention"),
    "decode": ([20] * 32, 640, "llama-3.1-8b", "fp32", NARROW, "attention"),
}


@pytest.mark.sweep(keep=3)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore:TF32 acceleration")  # of oneDNN's switch, on chips it has not
def test_the_plan_is_what_a_step_allocates(case: str) -> None:
    """The first step of the longest sequence, without oneDNN, whose scratch is another item."""
    prompts, budget, shape_name, dtype, changes, name = CASES[case]
    config = small_config(shape_name, num_hidden_layers=1, **changes)
    model = fill_random(build_model(config, parse_dtype(dtype), "cpu"))
    limits = Limits(max_context=1536, max_batch=32, token_budget=budget)
    recipe = Recipe(deterministic=True, limits=limits, kv=KV(prefix_cache=False))
    engine = Engine(model, recipe, num_pages=64)
    engine.generate([[5] * 30], [GREEDY])  # what is tried once is another item too
    forward, measured = engine.runner.forward, []
    wanted = max(prompts) + (len(prompts) > 1)  # several: when they decode together

    def watched(inputs: Any, kind: Any, *rest: Any) -> Any:
        if measured or int(inputs.totals.max()) < wanted:
            return forward(inputs, kind, *rest)
        gc.collect()
        with torch.backends.mkldnn.flags(enabled=False):
            found = allocations(lambda: forward(inputs, kind, *rest))
        measured.append((kind.shape.num_tokens, kind.shape.num_decode_rows, found.peak_bytes))
        return found.result

    engine.runner.forward = watched
    engine.generate([[5] * count for count in prompts], [GREEDY] * len(prompts))
    ((num_tokens, num_rows, used),) = measured
    about = {"num_tokens": num_tokens, "num_rows": num_rows, "num_keys": wanted}
    planned = fixed_peak(config, dtype, **about, page_size=engine.recipe.kv.page_size)
    assert planned.name == name
    assert planned.num_bytes == pytest.approx(used, rel=0.05)
    whole = itemise(config, engine.recipe, 2**40).bytes_of("activations")
    assert whole == step_peak(config, engine.recipe, budget).num_bytes >= 0.98 * used


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("shape_name", ["llama-3.1-8b", "qwen3-30b-a3b"])
def test_what_is_tried_once_is_planned_for(shape_name: str, dtype: Any) -> None:
    config = small_config(shape_name)
    deterministic = recipe_for(config, "cpu", dtype=dtype, deterministic=True)
    matrix = (config.vocab_size, config.hidden_size)  # the head is the largest here
    found = allocations(lambda: cpu_fixed._block_for.__wrapped__(matrix, parse_dtype(dtype), 1))
    planned = itemise(config, deterministic, 2**40).bytes_of("deterministic")
    assert planned == pytest.approx(found.peak_bytes, rel=0.05)


def asked_bytes(launcher: Any, monkeypatch: pytest.MonkeyPatch, target: str, call: Any) -> int:
    """Bytes of fp32 sums that a launcher hands to its kernel on this chip, besides its output."""
    found: list[int] = []

    def launch(kernel: Any, grid: Any, tensors: Any, **_: Any) -> None:
        sums = [t for t in tensors if isinstance(t, torch.Tensor) and t.dtype == torch.float32]
        found.append(sum(t.nbytes for t in {t.data_ptr(): t for t in sums}.values()))

    monkeypatch.setattr(launcher, "launch", launch)
    monkeypatch.setattr(launcher, "target_of", lambda tensor: TARGETS[target])
    call()
    return found[0]


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100", "gfx942"])
def test_products_keep_no_more_than_is_planned(
    target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher = pytest.importorskip("ridgeline.kernels.fixed_linear.triton")
    monkeypatch.setattr(launcher, "split_counters", lambda device: torch.zeros(1).int())
    weight_OD = torch.empty(4096, 14336, dtype=torch.bfloat16)
    most = 0
    for rows in (1, 60, 64, 129, 512, 900, 1000, 1024, 2048):
        x_MD = torch.empty(rows, 14336, dtype=torch.bfloat16)
        call = lambda x=x_MD: launcher.fixed_linear(x, weight_OD)  # noqa: E731
        asked = asked_bytes(launcher, monkeypatch, target, call)
        assert 0 < asked <= most_kept_bytes(4096, 14336, rows), rows
        most = max(most, asked)
    assert most > 0.1 * most_kept_bytes(4096, 14336, 2048)
    assert most_kept_bytes(4096, 4096, 2048) == 0  # one piece


@pytest.mark.parametrize("window", [None, 700])
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100", "gfx942"])
def test_attention_keeps_no_more_than_is_planned(
    target: str, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher = pytest.importorskip("ridgeline.kernels.deterministic_attention.triton")
    monkeypatch.setattr(launcher, "arrival_counters", lambda count, device: torch.zeros(1).int())
    heads = (32, 8, 128)
    pages = make_pages(1, 64, 8, 128, torch.bfloat16, "cpu")
    shares = []
    for rows in (1, 3, 16, 40, 65, 66, 150, 256):
        q_TNH = torch.empty(rows, 32, 128, dtype=torch.bfloat16)
        starts, lengths = torch.arange(rows + 1).int(), torch.full((rows,), 5).int()
        table = torch.zeros(rows, 128, dtype=torch.int32)
        call = partial(
            launcher.prefill_attention,
            q_TNH,
            Packing(starts, max_new=1),
            pages,
            PageTables(table, lengths, max_length=8192),
            AttentionSpec(0.1, window=window),
        )
        asked = asked_bytes(launcher, monkeypatch, target, call)
        planned = most_partial_bytes(*heads, rows, 8192, window)
        assert asked <= planned, rows
        shares.append(asked / planned)
    assert 0.5 < shares[0] <= 1.0
    assert shares[-1] == 0.0  # enough rows: a program takes all splits
    assert most_partial_bytes(*heads, 256, 512, window) == 0


def test_the_plan_has_them_as_an_item() -> None:
    config = describe_shape("llama-3.1-8b").config
    fixed = recipe_for(config, deterministic=True)
    usual = edited(fixed, "deterministic", False)
    plan, plain = (itemise(config, recipe, 139 * 2**30) for recipe in (fixed, usual))
    assert plain.bytes_of("deterministic") == 0
    assert 2**27 < plan.bytes_of("deterministic") < 2**30
    assert graph_bytes(config, fixed, 131) > graph_bytes(config, usual, 131)
    assert plan.num_pages < plain.num_pages
