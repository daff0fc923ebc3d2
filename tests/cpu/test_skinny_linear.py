"""What the registry's cases do not show: the choices of tiles, and the counters of split depths."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from ridgeline.kernels import skinny_linear as public
from ridgeline.kernels.quantized_linear import tune_space as packed
from ridgeline.kernels.skinny_linear import tune_space
from ridgeline.kernels.skinny_linear.cut import split_counters
from ridgeline.kernels.skinny_linear.fused import FusedParts
from ridgeline.kernels.skinny_linear.op import PROJECTIONS, REDUCE, SPLIT_REDUCE, cublas
from ridgeline.kernels.skinny_linear.triton import skinny_linear
from ridgeline.kernels.skinny_linear.tune_space import SkinnyConfig, shared_bytes
from ridgeline.kernels.targets import COMPILED, TARGETS


@pytest.mark.parametrize("num_rows", [1, 2, 16, 33, 64])
@pytest.mark.parametrize("gated", [False, True])
def test_every_choice_fits_its_target(num_rows: int, gated: bool) -> None:
    for target in (TARGETS[name] for name in COMPILED):
        for outputs, depth in PROJECTIONS.values():
            for bits in (8, 16):
                config = tune_space.choose(num_rows, outputs, depth, gated, target, bits)
                assert shared_bytes(config, gated, bits) <= target.shared_bytes
            for bits in (4, 8):
                config = packed.choose_packed(num_rows, outputs, depth, gated, target, bits)
                assert config.kind == "dot" or num_rows == 1


def test_search_space_holds_each_config_once() -> None:
    for num_rows in (1, 16, 64):
        for space in (tune_space.search_space, packed.search_space):
            configs = space(num_rows, 4096, 4096)
            assert len(configs) == len(set(configs)) > 8
            short = tune_space.shortlist(configs, 4096, False, TARGETS["sm_90"], count=8)
            assert len(short) == 8
            assert set(short) <= set(configs)


def test_counters_are_left_as_they_were_found() -> None:
    x = torch.randn(3, 256).to(torch.bfloat16)
    weight = torch.randn(32, 256).to(torch.bfloat16)
    split = SkinnyConfig("dot", 16, 16, 64, 4, 4, 2)
    first = skinny_linear(x, weight, config=split)
    assert not split_counters(x.device).any()
    assert torch.equal(first, skinny_linear(x, weight, config=split))


@pytest.mark.parametrize("config", [SkinnyConfig("dot", 16, 16, 64, 4, 4, 2), REDUCE, SPLIT_REDUCE])
def test_a_result_is_left_where_it_is_wanted(config: SkinnyConfig) -> None:
    x = torch.randn(3 if config.kind == "dot" else 1, 256).to(torch.bfloat16)
    weight = torch.randn(40, 256).to(torch.bfloat16)
    buffer = torch.full((5, 40), float("nan"), dtype=torch.bfloat16)
    out = buffer[: len(x)]
    assert skinny_linear(x, weight, out_MO=out, config=config) is out
    assert torch.equal(out, skinny_linear(x, weight, config=config))
    assert buffer[len(x) :].isnan().all()


@pytest.mark.parametrize("residual", [False, True])
def test_so_are_results_of_others(residual: bool) -> None:
    x, weight = torch.randn(3, 64), torch.randn(40, 64)
    fused = FusedParts(residual_MO=torch.randn(3, 40) if residual else None)
    by_name = {"x_MD": x, "weight_OD": weight, "residual_MO": fused.residual_MO}
    for make in (partial(public.skinny_linear, x, weight, fused), partial(cublas, **by_name)):
        out = torch.full((3, 40), float("nan"))
        assert make(out_MO=out) is out
        assert torch.equal(out, make())
