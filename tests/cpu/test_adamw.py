"""AdamW with an exact master: bit for bit what fp32 gives, over many steps and for odd numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ridgeline.kernels import host_library
from ridgeline.kernels.adamw import (
    AdamWFormat,
    AdamWState,
    AdamWStep,
    AdamWUpdate,
    cpu,
    joined,
    new_state,
    reference,
    split,
)

BETAS = {"beta1": 0.9, "beta2": 0.95}


def odd_numbers() -> Tensor:
    """Every exponent, both signs, ties of the rounding to bf16 and their neighbours, subnormals,
    zeros, infinities and NaNs of many kinds.
    """
    highs = torch.arange(0, 1 << 16, 37, dtype=torch.int64)
    lows = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    bits = (highs[:, None] << 16 | lows).flatten()
    last = torch.tensor([0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001, 0x80000000, 0x7F7FFFFF, 0x7F800000])
    bits = torch.cat((bits, last))
    return torch.where(bits >= 1 << 31, bits - (1 << 32), bits).to(torch.int32).view(torch.float32)


def test_a_weight_and_its_remainder_are_the_master_to_the_bit() -> None:
    master = odd_numbers()
    weight, remainder = split(master)
    again = joined(weight, remainder)
    known = ~master.isnan()
    assert torch.equal(again.view(torch.int32)[known], master.view(torch.int32)[known])
    assert again[~known].isnan().all()
    assert weight[~known].isnan().all()
    # What the model sees is the master rounded to the nearest: torch's rounding but for ties.
    ties = (master.view(torch.int32) & 0xFFFF) == 0x8000
    same = weight.view(torch.int16) == master.bfloat16().view(torch.int16)
    assert same[known & ~ties].all()
    assert ties.any()


def states(format: AdamWFormat, sizes: tuple[int, ...] = (700, 3)) -> list[AdamWState]:
    generator = torch.Generator().manual_seed(3)
    result = []
    for salt, size in enumerate(sizes):
        master = torch.randn(size, generator=generator)
        dtype = torch.float32 if format.weight == "fp32" else torch.bfloat16
        result.append(new_state(torch.empty(size, dtype=dtype), format, master, salt))
    return result


def run(format: AdamWFormat, num_steps: int, **numbers: float) -> tuple[list[AdamWState], Tensor]:
    """The same gradients for every format: they do not hang on the weights."""
    own = states(format)
    optimizer = AdamWUpdate(own)
    generator = torch.Generator().manual_seed(4)
    lost = torch.zeros((), dtype=torch.int64)
    for number in range(1, num_steps + 1):
        grads = [torch.randn(len(s.weight), generator=generator).bfloat16() for s in own]
        step = AdamWStep(step=number, weight_decay=0.1, **{"lr": 1e-5} | BETAS | numbers)
        lost += optimizer.step(grads, step, torch.tensor(0.5))
    return own, lost


@pytest.mark.parametrize("moments", ["fp32", "bf16", "8-bit"])
def test_the_exact_master_is_fp32s_over_many_steps(moments: str) -> None:
    exact, lost = run(AdamWFormat("exact", moments), 60)  # type: ignore[arg-type]
    plain, lost_in_fp32 = run(AdamWFormat("fp32", moments), 60)  # type: ignore[arg-type]
    for one, two in zip(exact, plain, strict=True):
        assert one.remainder is not None
        assert torch.equal(joined(one.weight, one.remainder), two.weight)
        assert torch.equal(one.first, two.first)
    assert lost == lost_in_fp32 < 0.01 * 60 * 703  # those that fp32 cannot hold either


def test_it_is_torchs_adamw() -> None:
    own, _ = run(AdamWFormat("exact", "fp32"), 30, lr=1e-2)
    theirs = [state.weight.clone() for state in states(AdamWFormat("fp32", "fp32"))]
    betas = (BETAS["beta1"], BETAS["beta2"])
    optimizer = torch.optim.AdamW(theirs, lr=1e-2, betas=betas, eps=1e-8, weight_decay=0.1)
    generator = torch.Generator().manual_seed(4)
    for _ in range(30):
        for weight in theirs:
            weight.grad = torch.randn(len(weight), generator=generator).bfloat16().float() * 0.5
        optimizer.step()
    for state, expected in zip(own, theirs, strict=True):
        assert state.remainder is not None
        torch.testing.assert_close(joined(state.weight, state.remainder), expected)


def test_pure_bf16_loses_small_updates_and_says_how_many() -> None:
    """Weights of one, gradients of one, a rate of 1e-5: a hundred steps move nothing."""
    moved = {}
    counted = {}
    for name, format in {
        "nearest": AdamWFormat("bf16", "bf16"),
        "stochastic": AdamWFormat("bf16", "bf16", stochastic_weight=True),
        "exact": AdamWFormat("exact", "bf16"),
    }.items():
        state = new_state(torch.ones(4096, dtype=torch.bfloat16), format)
        grad = torch.ones(4096, dtype=torch.bfloat16)
        lost = 0
        for step in range(1, 101):
            lost += int(AdamWUpdate([state]).step([grad], AdamWStep(lr=1e-5, step=step)))
        weight = state.weight.float()
        if state.remainder is not None:
            weight = joined(state.weight, state.remainder)
        moved[name], counted[name] = float(1 - weight.mean()), lost
    assert moved["nearest"] == 0.0
    assert counted["nearest"] == 100 * 4096
    assert counted["exact"] == 0
    assert abs(moved["exact"] - 1e-3) < 2e-6
    assert abs(moved["stochastic"] - 1e-3) < 2e-4
    assert counted["stochastic"] < counted["nearest"]


@pytest.mark.parametrize("moments", ["bf16", "8-bit"])
def test_a_second_moment_that_is_rounded_at_random_falls_where_a_nearest_one_stays(
    moments: str,
) -> None:
    """With beta2 = 0.999 a step takes a thousandth away: less than half a unit of bf16."""
    left = {}
    for stochastic in (True, False):
        format = AdamWFormat("fp32", moments, stochastic_moments=stochastic)  # type: ignore[arg-type]
        state = new_state(torch.zeros(2048), format)
        state.second.fill_(255 if moments == "8-bit" else 1.0)
        state.second.view(-1)[::2] = 200 if moments == "8-bit" else 0.5
        if state.second_scale is not None:
            state.second_scale.fill_(1.0)
        grad = torch.zeros(2048)
        grad[1::256] = 1.0  # so that no block's scale falls
        before = reference.moments_of(state, slice(0, reference.PIECE))[1]
        for step in range(1, 101):
            numbers = AdamWStep(lr=0.0, step=step, beta2=0.999)
            AdamWUpdate([state]).step([grad], numbers)
        after = reference.moments_of(state, slice(0, reference.PIECE))[1]
        left[stochastic] = float(after[::2].sum() / before[::2].sum())
    assert abs(left[True] - 0.999**100) < 0.02
    assert left[False] > 0.95


def test_a_factor_that_is_not_finite_changes_nothing() -> None:
    own = states(AdamWFormat("exact", "8-bit"))
    before = [(s.weight.clone(), s.first.clone()) for s in own]
    grads = [torch.ones_like(state.weight) for state in own]
    for clip in (float("nan"), float("inf")):
        assert AdamWUpdate(own).step(grads, AdamWStep(lr=1.0, step=1), torch.tensor(clip)) == 0
    for state, (weight, first) in zip(own, before, strict=True):
        assert torch.equal(state.weight, weight)
        assert torch.equal(state.first, first)


def test_a_weight_without_a_gradient_stays() -> None:
    own, moved = states(AdamWFormat("exact", "bf16")), states(AdamWFormat("exact", "bf16"))
    grads = [torch.ones_like(state.weight) for state in own]
    AdamWUpdate(own).step([None, grads[1]], AdamWStep(lr=0.1, step=1, weight_decay=0.1))
    AdamWUpdate(moved).step(grads, AdamWStep(lr=0.1, step=1, weight_decay=0.1))
    assert torch.equal(own[0].weight, states(AdamWFormat("exact", "bf16"))[0].weight)
    assert torch.equal(own[1].weight, moved[1].weight)
    assert int(AdamWUpdate(own).step([None, None], AdamWStep(lr=0.1, step=1))) == 0


def test_numbers_that_are_not_finite_stay_in_sight() -> None:
    for moments in ("fp32", "bf16", "8-bit"):
        state = new_state(
            torch.zeros(600, dtype=torch.bfloat16),
            AdamWFormat("exact", moments),  # type: ignore[arg-type]
        )
        grad = torch.zeros(600)
        grad[300] = float("nan")
        AdamWUpdate([state]).step([grad], AdamWStep(lr=0.1, step=1))
        AdamWUpdate([state]).step([torch.zeros(600)], AdamWStep(lr=0.1, step=2))
        assert state.weight[300].isnan(), moments
        assert state.weight[:256].isfinite().all(), "another block's"


def test_the_same_seed_draws_the_same_and_another_does_not() -> None:
    format = AdamWFormat("bf16", "bf16", stochastic_weight=True)
    weights = [run(format, 5, seed=seed, lr=1e-3)[0][0].weight for seed in (1, 1, 2)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


@pytest.mark.parametrize(
    ("change", "words"),
    [({"lr": float("nan")}, "lr is nan"), ({"beta2": 1.0}, "beta2 is 1.0"), ({"step": 0}, "step")],
)
def test_numbers_that_make_no_sense_are_named(change: dict[str, float], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        replace(AdamWStep(lr=1e-3, step=1), **change)


def test_a_gradient_that_does_not_fit_is_named() -> None:
    own = states(AdamWFormat("exact", "bf16"))
    with pytest.raises(ValueError, match="gradient 1 is"):
        AdamWUpdate(own).step([torch.zeros(700), torch.zeros(4)], AdamWStep(lr=1e-3, step=1))
    with pytest.raises(ValueError, match="needs torch"):
        new_state(torch.zeros(3), AdamWFormat("exact", "bf16"))


def test_the_compiled_pass_gives_the_references_bits() -> None:
    """Odd sizes, gradients of all magnitudes, updates that are lost."""
    if not host_library.prepare():
        pytest.skip("no C++ compiler here")
    generator = torch.Generator().manual_seed(5)
    for size in (1, 63, 40_003):
        weight = torch.randn(size, generator=generator)
        ours, defined = (new_state(weight.clone(), AdamWFormat("fp32", "fp32")) for _ in range(2))
        for number in range(1, 5):
            powers = torch.randint(-20, 3, (size,), generator=generator)
            grad = torch.randn(size, generator=generator) * 10.0**powers
            step = AdamWStep(lr=1e-7, step=number, weight_decay=0.1)
            clip = torch.tensor(0.37)
            assert cpu.serves(ours, grad)
            lost = AdamWUpdate([ours]).step([grad], step, clip)
            assert torch.equal(lost, reference.adamw_([defined], [grad], step, clip))
            for name in ("weight", "first", "second"):
                assert torch.equal(getattr(ours, name), getattr(defined, name)), (size, name)
        before = ours.weight.clone()
        AdamWUpdate([ours]).step([grad], step, torch.tensor(torch.nan))
        assert torch.equal(ours.weight, before)
