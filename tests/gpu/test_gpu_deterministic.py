"""`deterministic` on a GPU: the same bits whatever the number of rows, the batch, the chunks,
prefix hits and preemption; first op by op, then 200 requests through the engine.
"""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from engines import assert_idle, tiny
from replays import Logits, assert_same, replay, requests_of
from torch import Tensor

from ridgeline.engine import Engine
from ridgeline.kernels.attention.inputs import random_cache
from ridgeline.kernels.attention.reference import AttentionSpec
from ridgeline.kernels.deterministic_attention import decode as fixed_decode
from ridgeline.kernels.deterministic_attention import triton as fixed
from ridgeline.kernels.fixed_linear import agreement
from ridgeline.kernels.fixed_linear import triton as linear
from ridgeline.kernels.fixed_linear.tiles import FEW, HOPPER, HOPPER_FEW, PIECE, _paired
from ridgeline.kernels.launch import target_of
from ridgeline.kernels.moe import triton as moe
from ridgeline.kernels.pages import PageTables
from ridgeline.kernels.prefill_attention import Packing
from ridgeline.kernels.rms_norm import triton as norm
from ridgeline.kernels.sampling import sample_rows
from ridgeline.kernels.skinny_linear.fused import FusedParts
from ridgeline.models import Transformer, build_model, fill_random
from ridgeline.models.shapes import describe_shape
from ridgeline.recipe import KV, Limits, Recipe

ROWS = (1, 2, 17, 64, 65, 128, 300, 2048, 8192)
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def drawn(*shape: int, dtype: torch.dtype = BF16, scale: float = 1.0) -> Tensor:
    generator = torch.Generator(device="cuda").manual_seed(sum(shape))
    return (torch.randn(shape, device="cuda", generator=generator) * scale).to(dtype)


def assert_rows_agree(function: Any, x: Tensor, sizes: tuple[int, ...] = ROWS) -> None:
    """The first rows, and rows from the middle, alone as among all."""
    whole = function(x)
    for size in sizes:
        for start in (0, (len(x) - size) // 2):
            part = function(x[start : start + size])
            assert torch.equal(part, whole[start : start + size]), (size, start)


@pytest.mark.parametrize(("outputs", "depth"), [(4096, 4096), (4096, 14336), (1000, 5120)])
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("activation", [None, "silu"])
def test_products_of_any_number_of_rows(
    outputs: int, depth: int, dtype: torch.dtype, activation: Any
) -> None:
    """Through the tiles that are chosen for each."""
    weight = drawn(outputs * (2 if activation else 1), depth, dtype=dtype, scale=depth**-0.5)
    x = drawn(8192, depth, dtype=dtype)
    fused = FusedParts(activation=activation)
    assert_rows_agree(lambda rows: linear.fixed_linear(rows, weight, fused), x)


def test_products_in_fp32() -> None:
    weight, x = drawn(600, 5120, dtype=FP32), drawn(512, 5120, dtype=FP32)
    assert_rows_agree(lambda rows: linear.fixed_linear(rows, weight), x, (1, 2, 17, 64, 65, 300))


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(
    ("outputs", "depth"), [(1024, 14336), (1024, 4096), (1000, 5120), (72, 200)]
)
def test_every_tile_gives_the_same_bits(
    outputs: int, depth: int, gated: bool, dtype: torch.dtype
) -> None:
    """Each of sm_90's tiles, with pieces apart and together, on rows that fill no tile: a wrong
    guess about its matrix instructions is seen here. (If it ever is, `deterministic` finds out too,
    and goes on with one tile: kernels/fixed_linear/agreement.py.)
    """
    if not on_hopper():
        pytest.skip("these tiles are sm_90's")
    activation: Any = "silu" if gated else None
    weight = drawn(outputs * (2 if gated else 1), depth, dtype=dtype, scale=depth**-0.5)
    bias = drawn(outputs * (2 if gated else 1), dtype=dtype)
    x, residual = drawn(300, depth, dtype=dtype), drawn(300, outputs, dtype=dtype)
    several = depth > PIECE
    tiles = {*HOPPER_FEW, *(_paired(tile, gated) for tile in HOPPER), replace(FEW, block_k=64)}
    expected = None
    for tile in tiles:
        if several and tile.block_m == 256:
            continue  # it spills, and is not offered
        for apart in (True, False) if several else (None,):
            fused = FusedParts(bias, residual, activation=activation)
            found = linear.fixed_linear(x, weight, fused, tile=tile, apart=apart)
            expected = found if expected is None else expected
            assert torch.equal(found, expected), (tile, apart)


def on_hopper() -> bool:
    return target_of(torch.empty(0, device="cuda")).name == "sm_90"


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_the_chip_agrees_with_itself(dtype: torch.dtype, tmp_path: Any, monkeypatch: Any) -> None:
    """What an engine asks at its start, here without the cache."""
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path))
    assert agreement.tiles_agree(torch.device("cuda"), dtype)
    assert len(list(tmp_path.rglob("*fixed*.json"))) == on_hopper()


def test_a_result_can_be_left_in_a_buffer() -> None:
    x, weight = drawn(70, 4096), drawn(1000, 4096, scale=0.02)
    buffer = torch.full((96, 1000), float("nan"), dtype=BF16, device="cuda")
    found = linear.fixed_linear(x, weight, out_MO=buffer[:70])
    assert found.data_ptr() == buffer.data_ptr()
    assert torch.equal(found, linear.fixed_linear(x, weight))
    assert buffer[70:].isnan().all()


@pytest.mark.parametrize("columns", [128, 2048, 4096, 5120])
def test_norms_of_any_number_of_rows(columns: int) -> None:
    weight = drawn(columns)
    assert_rows_agree(
        lambda rows: norm.rms_norm(rows, weight, 1e-5, fixed=True), drawn(8192, columns)
    )


@pytest.mark.parametrize("experts", [(8, 2, 1024, 1792), (128, 8, 2048, 768)])
def test_experts_of_any_number_of_tokens(experts: tuple[int, int, int, int]) -> None:
    num, per_token, hidden, size = experts
    gate_up, down = drawn(num, 2 * size, hidden, scale=0.05), drawn(num, hidden, size, scale=0.05)
    router = drawn(num, hidden, scale=0.05)

    def mixed(x: Tensor) -> Tensor:
        routed = moe.route(linear.fixed_linear(x, router), per_token, True)
        return moe.mixture_of_experts(x, *routed, gate_up, down, "silu", fixed=True)

    assert_rows_agree(mixed, drawn(8192, hidden))


@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize(
    ("cache", "head_dim"), [(BF16, 128), (BF16, 64), (BF16, 256), (torch.int8, 128)]
)
def test_attention_of_any_piece(window: int | None, cache: torch.dtype, head_dim: int) -> None:
    """A prompt of 2000 tokens at once, in pieces, and its tokens one by one."""
    device, length = torch.device("cuda"), 2000
    generator = torch.Generator(device=device).manual_seed(0)
    cached = random_cache([length], 8, head_dim, 64, cache, device, generator)
    pages, table = cached["pages"], cached["tables"].page_table
    q, spec = drawn(length, 32, head_dim), AttentionSpec(head_dim**-0.5, window)

    def attend(
        bounds: list[tuple[int, int]],
        max_length: int | None = None,
        max_new: int | None = None,
        **how: Any,
    ) -> Tensor:
        """Pieces of the one sequence, each as a sequence of its own with as many keys."""
        rows = torch.cat([q[start:end] for start, end in bounds])
        counts = torch.tensor([end - start for start, end in bounds])
        starts = torch.cat((torch.zeros(1, dtype=torch.int64), counts.cumsum(0)))
        lengths = torch.tensor([end for _, end in bounds], dtype=torch.int32, device=device)
        tables = PageTables(table.expand(len(bounds), -1).contiguous(), lengths, max_length)
        packing = Packing(starts.int().to(device), max_new)
        return fixed.prefill_attention(rows, packing, pages, tables, spec, **how)

    whole = attend([(0, length)])
    alone = [(i, i + 1) for i in range(0, length, 7)]
    rows = torch.tensor([start for start, _ in alone], device=device)
    for how in ({}, {"apart": True}, {"apart": False}):
        assert torch.equal(attend(alone, max_new=1, max_length=length, **how), whole[rows]), how
    order = torch.randperm(len(alone), device=device, generator=generator).int()
    each = table.expand(len(alone), -1).contiguous()
    tables = PageTables(each, (rows + 1).int(), length, order)
    for parts in (None, 1, 2, 4):
        single = fixed_decode.decode_rows(q[rows], pages, tables, spec, parts=parts)
        assert torch.equal(single, whole[rows]), parts
    cuts = [0, 1, 5, 64, 100, 512, 513, 1023, 1500, length]
    for apart in (True, False):
        pieces = attend(list(pairwise(cuts)), max_length=length, apart=apart)
        assert torch.equal(pieces, whole)


def test_sampling_of_any_number_of_rows() -> None:
    logits = drawn(512, 128256, dtype=FP32, scale=3.0)
    temperature = torch.rand(512, device="cuda") + 0.3
    seeds, positions = torch.arange(512, device="cuda"), torch.arange(512, device="cuda")
    filters = {
        "top_k_B": torch.randint(0, 60, (512,), device="cuda", dtype=torch.int32),
        "top_p_B": torch.rand(512, device="cuda") * 0.5 + 0.5,
        "min_p_B": torch.zeros(512, device="cuda"),
    }

    def sample(rows: Tensor) -> Tensor:
        about = (logits[rows], temperature[rows], seeds[rows], positions[rows])
        return sample_rows(*about, **{name: values[rows] for name, values in filters.items()})

    assert_rows_agree(sample, torch.arange(512, device="cuda"), (1, 2, 17, 64, 300))


def small_model(name: str, layers: int) -> Transformer:
    config = describe_shape(name, num_layers=layers).config
    return fill_random(build_model(config, BF16, "cuda"))


def engine_of(model: Transformer, num_pages: int, **changes: Any) -> Engine:
    """`budget` tokens a step; the rest goes to the recipe."""
    budget, max_batch = changes.pop("budget", 2048), changes.pop("max_batch", 64)
    prefix_cache = changes.pop("prefix_cache", True)
    kv = KV(page_size=64, prefix_cache=prefix_cache, dtype=changes.pop("kv_dtype", "auto"))
    limits = Limits(max_batch=max_batch, token_budget=budget, max_context=4096)
    return Engine(
        model, Recipe(kv=kv, limits=limits, deterministic=True, **changes), num_pages=num_pages
    )


RUNS: list[tuple[int, int, dict[str, Any]]] = [  # at once, pages, the engine's limits
    (200, 2000, {"max_batch": 200}),
    (48, 2000, {"budget": 160, "graphs": False}),
    (32, 60, {"budget": 512, "overlap": False}),
    (16, 2000, {"budget": 333, "prefix_cache": False}),
]


@pytest.mark.parametrize(
    ("name", "layers", "kv_dtype"),
    [("llama-3.1-8b", 3, "auto"), ("llama-3.2-1b", 4, "int8")],
)
def test_200_requests_alone_and_in_any_company(name: str, layers: int, kv_dtype: str) -> None:
    model, draw = small_model(name, layers), random.Random(1)
    requests = requests_of(200, 700, (4, 24), vocab_size=model.config.vocab_size)
    order, kept = list(range(200)), Logits()
    alone = engine_of(model, 500, prefix_cache=False, kv_dtype=kv_dtype)
    expected = replay(alone, requests, order, 1, kept)
    del alone
    preempted = hits = 0
    for at_once, num_pages, limits in RUNS:
        draw.shuffle(order)
        engine = engine_of(model, num_pages, kv_dtype=kv_dtype, **limits)
        assert_same(replay(engine, requests, order, at_once, kept, preempt=0.2), expected)
        assert_idle(engine)
        preempted += engine.stats.num_preemptions
        hits += engine.stats.hit_tokens
    assert preempted > 20
    assert hits > 0


@pytest.mark.parametrize("name", ["qwen3-moe", "gemma2", "gemma3"])
def test_other_families(name: str) -> None:
    """Experts, windows, soft-caps."""
    model, draw = tiny(name, "bf16", "cuda"), random.Random(2)
    requests = requests_of(60, 60, (3, 10))
    order, kept = list(range(60)), Logits()

    def engine(num_pages: int, budget: int, graphs: bool) -> Engine:
        limits = Limits(max_batch=32, token_budget=budget)
        recipe = Recipe(kv=KV(page_size=16), limits=limits, deterministic=True, graphs=graphs)
        return Engine(model, recipe, num_pages=num_pages)

    expected = replay(engine(200, 64, True), requests, order, 1, kept)
    for num_pages, budget, graphs in ((200, 256, True), (20, 40, False)):
        draw.shuffle(order)
        outputs = replay(engine(num_pages, budget, graphs), requests, order, 32, kept, preempt=0.1)
        assert_same(outputs, expected)
