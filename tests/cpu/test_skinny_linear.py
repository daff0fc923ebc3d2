"""What the registry's cases do not show: the choices of tiles, and the counters of split depths."""

from __future__ import annotations

import pytest
import torch

from ridgeline.kernels.quantized_linear import tune_space as packed
from ridgeline.kernels.skinny_linear import tune_space
from ridgeline.kernels.skinny_linear.cut import split_counters
from ridgeline.kernels.skinny_linear.op import PROJECTIONS
from ridgeline.kernels.skinny_linear.triton import skinny_linear
from ridgeline.kernels.skinny_linear.tune_space import Config, shared_bytes
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
    split = Config("dot", 16, 16, 64, 4, 4, 2)
    first = skinny_linear(x, weight, config=split)
    assert not split_counters(x.device).any()
    assert torch.equal(first, skinny_linear(x, weight, config=split))
