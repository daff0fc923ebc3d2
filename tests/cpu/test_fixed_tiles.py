"""Which tile serves a fixed product: by time where it was timed, by a model where not, never one
that changes bits; and what happens on a chip whose tiles do not agree.
"""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import tiny
from torch import Tensor

from ridgeline.engine.loading import deterministic as engine_deterministic
from ridgeline.engine.loading.deterministic import FixedLinear, deterministic
from ridgeline.errors import UnsupportedError
from ridgeline.kernels.fixed_linear import agreement, tiles, tune_space
from ridgeline.kernels.fixed_linear.op import BENCH, search
from ridgeline.kernels.fixed_linear.tile import Tile
from ridgeline.kernels.fixed_linear.tiles import (
    FEW,
    HOPPER,
    HOPPER_FEW,
    ONE,
    choose,
    keeps_bits,
    num_programs,
    ranked,
)
from ridgeline.kernels.launch import recording
from ridgeline.kernels.targets import TARGETS

SM_90, CPU, BF16 = TARGETS["sm_90"], torch.device("cpu"), torch.bfloat16


def test_every_tile_of_the_space_keeps_bits_and_fits() -> None:
    for rows in (1, 64, 65, 256, 8192):
        for outputs, depth, gated in (
            (6144, 4096, False),
            (14336, 4096, True),
            (4096, 14336, False),
        ):
            space = tune_space.search_space(rows, outputs, depth, gated, SM_90)
            assert len(space) >= 5
            for tile in space:
                assert keeps_bits(tile, SM_90)
                across = tile.across * (2 if gated else 1)
                stage = (tile.block_m + across) * tile.block_k * 2
                assert stage * tile.num_stages <= SM_90.shared_bytes, tile
                assert tile.num_sums(gated) // (32 * tile.num_warps) <= 128, tile
    assert tune_space.search_space(256, 4096, 4096, False, TARGETS["sm_80"]) == []


@pytest.mark.parametrize(
    "change", [{"block_m": 32}, {"num_warps": 2}, {"block_k": 8}, {"block_k": 96}, {"block_o": 4}]
)
def test_tiles_of_another_instruction_or_of_broken_steps_do_not_keep_bits(change: Any) -> None:
    assert keeps_bits(FEW, SM_90)
    assert not keeps_bits(replace(FEW, **change), SM_90)


def test_many_rows_take_large_tiles_and_few_programs_small_ones() -> None:
    many = choose(8192, 14336, 1, True, BF16, SM_90)
    assert many.num_sums(True) == 128 * 256
    narrow = choose(128, 4096, 1, False, BF16, SM_90)  # 128x128 would leave most of the chip idle
    assert num_programs(narrow, 128, 4096) > 0.9 * SM_90.num_units
    assert choose(64, 4096, 1, False, BF16, SM_90) in HOPPER_FEW
    assert choose(1, 4096, 4, False, BF16, SM_90, one_tile=True) == ONE
    assert choose(8192, 4096, 4, False, BF16, SM_90, one_tile=True) == ONE
    assert all(tile.block_m < 256 for tile in ranked(512, 4096, 14336, 4, False, SM_90))


def test_the_timed_tile_is_taken_unless_it_would_change_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launcher = pytest.importorskip("ridgeline.kernels.fixed_linear.triton")
    fast, wrong = replace(HOPPER[1], num_stages=5), replace(FEW, block_m=16)
    asked: list[str] = []

    def chosen(op: str, key: str, device: Any, usable: Any) -> Any:
        asked.append(key)
        known = [asdict(wrong), {"BLOCK": 3}, asdict(fast)]  # the fastest first
        return next((config for config in known if usable(config)), None)

    monkeypatch.setattr(tune_space, "chosen", chosen)
    x, weight = (torch.empty(rows, 4096, dtype=BF16, device="meta") for rows in (200, 512))

    def tile_of(**more: Any) -> tuple[int, ...]:
        with recording(SM_90) as calls:
            launcher.fixed_linear(x, weight, **more)
        constants = calls[0].constants
        sizes = tuple(constants[name] for name in ("BLOCK_M", "BLOCK_O", "BLOCK_K"))
        return (*sizes, calls[0].num_stages)

    assert tile_of() == (128, 128, 64, 5)
    assert asked == ["bf16 256x512x4096"]
    assert tile_of(one_tile=True) == (ONE.block_m, ONE.block_o, ONE.block_k, ONE.num_stages)
    assert len(asked) == 1


def test_bench_cases_are_those_that_are_asked_for() -> None:
    """A key of a bench case holds for all rows up to its own."""
    keys = set()
    with recording(SM_90):
        for case in BENCH:
            rows, outputs, depth = case.make.args[0]  # type: ignore[attr-defined]
            gated = case.make.args[3] is not None  # type: ignore[attr-defined]
            x = torch.empty(rows, depth, dtype=BF16, device="meta")
            weight = torch.empty(outputs * (1 + gated), depth, dtype=BF16, device="meta")
            found = search(x, weight, "silu" if gated else None)
            assert found is not None
            assert len({json.dumps(asdict(tile)) for tile in found.configs}) >= 5
            keys.add(found.key)
    for rows in (3, 65, 208, 432, 900, 2048, 5000, 100_000):
        assert tune_space.tune_key(rows, 6144, 4096, False, BF16) in keys


def product(x_MD: Tensor, weight_OD: Tensor, tile: Tile) -> Tensor:
    return x_MD.float() @ weight_OD.float().T


def test_a_tile_that_sums_otherwise_is_found() -> None:
    assert agreement.differing_tiles(CPU, BF16, product) == []
    odd = agreement.tried()[3]

    def reversed_for_one(x_MD: Tensor, weight_OD: Tensor, tile: Tile) -> Tensor:
        columns = slice(None) if tile != odd else torch.arange(x_MD.shape[1] - 1, -1, -1)
        return product(x_MD[:, columns], weight_OD[:, columns], tile).to(BF16)

    assert agreement.differing_tiles(CPU, BF16, reversed_for_one) == [odd]


def test_the_chip_is_asked_once_and_again_for_other_tiles(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: type("P", (), NAMED))
    monkeypatch.setattr("ridgeline.kernels.launch.target_of", lambda tensor: SM_90)
    tries: list[torch.dtype] = []

    def differing(device: Any, dtype: torch.dtype, product: Any) -> list[Tile]:
        tries.append(dtype)
        return [FEW] if dtype == torch.float16 else []

    monkeypatch.setattr(agreement, "differing_tiles", differing)
    with caplog.at_level(logging.WARNING):
        assert [agreement.tiles_agree(CPU, BF16) for _ in range(2)] == [True, True]
    assert tries == [BF16]
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        assert [agreement.tiles_agree(CPU, torch.float16) for _ in range(2)] == [False, False]
    assert tries == [BF16, torch.float16]
    assert "one tile for any number of rows" in caplog.text
    kept = sorted(tmp_path.rglob("*fixed*.json"))
    assert [json.loads(file.read_text())["differing"] for file in kept] == [[], [str(FEW)]]
    kept[0].write_text(json.dumps({"tiles": "others", "differing": []}))
    agreement.tiles_agree(CPU, BF16)
    kept[0].write_text("{")
    agreement.tiles_agree(CPU, BF16)
    assert tries == [BF16, torch.float16, BF16, BF16]
    assert agreement.tiles_agree(CPU, torch.float32)  # one tile anyway


NAMED = {"name": "NVIDIA H200"}


def test_one_tile_reaches_every_product_and_experts_are_refused() -> None:
    fixed = deterministic(tiny("llama-mha"), one_tile=True)
    linears = [module for module in fixed.modules() if isinstance(module, FixedLinear)]
    assert linears
    assert all(module.one_tile for module in linears)
    with pytest.raises(UnsupportedError, match="mixture of experts"):
        deterministic(tiny("qwen3-moe"), one_tile=True)
    assert engine_deterministic.tiles_agree is agreement.tiles_agree
    assert tune_space.ROWS[0] == tiles.FEW_ROWS
