"""Sampling of a batch: the generator bit by bit, draws over groups, ties, penalties, NaN."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from ridgeline.kernels.sampling import filtered_logits, sample, sample_rows
from ridgeline.kernels.sampling import triton as kernels
from ridgeline.kernels.sampling.draw import gumbel
from ridgeline.kernels.sampling.reference import GROUP, _gumbel, _philox, adjusted_logits
from ridgeline.kernels.sampling.tune_space import SamplingConfig, search_space
from ridgeline.kernels.targets import TARGETS

PLAIN = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


@triton.jit
def noise_kernel(seed_ptr, position_ptr, bits_ptr, noise_ptr, STREAM: tl.constexpr):
    index = tl.arange(0, 64) + 1000
    seed, position = tl.load(seed_ptr), tl.load(position_ptr)
    zero = index.to(tl.uint32) * 0
    c1 = zero + position.to(tl.uint32)
    bits, _, _, _ = tl.philox(seed, index.to(tl.uint32), c1, zero + STREAM, zero)
    tl.store(bits_ptr + tl.arange(0, 64), bits.to(tl.int64))
    tl.store(noise_ptr + tl.arange(0, 64), gumbel(index, seed, position, STREAM))


@pytest.mark.parametrize("seed", [0, 1, 1 << 32, (1 << 63) + 12345, (1 << 64) - 1])
@pytest.mark.parametrize("stream", [0, 1])
def test_the_kernels_noise_is_the_references(seed: int, stream: int) -> None:
    signed = seed - (1 << 64) if seed >= 1 << 63 else seed
    bits, noise = torch.empty(64, dtype=torch.int64), torch.empty(64)
    index, position = torch.arange(1000, 1064), 77_000
    noise_kernel[(1,)](torch.tensor([signed]), torch.tensor([position]), bits, noise, STREAM=stream)
    assert torch.equal(bits, _philox(index, position, seed, stream))
    assert torch.equal(bits, _philox(index, position, signed, stream))
    torch.testing.assert_close(noise, _gumbel(index, seed, position, stream), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("num", [200, pytest.param(2000, marks=pytest.mark.slow)])
def test_draws_over_several_groups_follow_the_distribution(num: int) -> None:
    """Chi-square over five entries in three groups; 23.5 is the 99.99% point for 4 degrees."""
    places = torch.tensor([3, 4, GROUP + 1, 2 * GROUP, 2 * GROUP + 9])
    logits = torch.full((3 * GROUP - 5,), float("-inf"))
    logits[places] = torch.tensor([1.0, 0.3, 0.0, -0.5, 0.8])
    expected = torch.softmax(logits[places], 0) * num
    draws = torch.tensor([int(sample(logits, **PLAIN, seed=5, position=p)) for p in range(num)])  # type: ignore[arg-type]
    counts = torch.stack([(draws == place).sum() for place in places])
    assert counts.sum() == num
    assert ((counts - expected) ** 2 / expected).sum() < 23.5


def test_ties_with_the_last_one_kept_are_kept() -> None:
    logits = torch.tensor([2.0, 1.0, 1.0, 1.0, 0.0, -5.0])
    options = {**PLAIN, "top_p": 0.55}  # 0.43 for the first: one of the three equals is needed
    assert filtered_logits(logits, **options).isfinite().tolist() == [True] * 4 + [False] * 2  # type: ignore[arg-type]
    options = {**PLAIN, "top_k": 2}
    assert filtered_logits(logits, **options).isfinite().tolist() == [True] * 4 + [False] * 2  # type: ignore[arg-type]
    drawn = kernels.sample_rows(
        logits.expand(8, -1),
        torch.ones(8),
        torch.full((8,), 3),
        torch.arange(8),
        top_p_B=torch.full((8,), 0.55),
    )
    assert set(drawn.tolist()) == {0, 1, 2, 3}


def settings_of(rows: int, **filters: float) -> dict[str, torch.Tensor]:
    """The same filters for all rows, at seeds and positions of their own."""
    options = {f"{name}_B": torch.full((rows,), value) for name, value in filters.items()}
    if "top_k_B" in options:
        options["top_k_B"] = options["top_k_B"].int()
    words = torch.randint(-(2**62), 2**62, (rows,), generator=torch.Generator().manual_seed(rows))
    return {
        "temperature_B": torch.ones(rows),
        "seed_B": words,
        "position_B": torch.arange(rows) * 31,
        **options,
    }


def awkward_rows(size: int) -> torch.Tensor:
    """Ties at the threshold, next to nothing left, thresholds that a sample misjudges."""
    logits = torch.randn(6, size, generator=torch.Generator().manual_seed(7))
    column = torch.arange(size)
    logits[0] = 0.25
    logits[1] = (logits[1] * 2).round() / 2
    logits[2, column % 97 != 5] = float("-inf")
    logits[3, column % 24 > 15] += 3.0  # hidden: the sample takes the first 8 of every 23 or 24
    logits[4] = logits[4].sort(descending=True).values
    logits[5] *= 1e4
    return logits


@pytest.mark.sweep(keep=1)
@pytest.mark.parametrize("few", [1, 64])
@pytest.mark.parametrize(
    "filters", [{"top_p": 0.8}, {"top_k": 40.0}, {"top_k": 30.0, "top_p": 0.6, "min_p": 0.05}]
)
def test_awkward_rows_are_searched_exactly(filters: dict[str, float], few: int) -> None:
    logits, settings = awkward_rows(6000), settings_of(6, **filters)
    found = kernels.sample_rows(logits, few=few, **settings)
    assert torch.equal(found, sample_rows(logits, **settings))


def test_a_row_is_sampled_alike_in_every_batch() -> None:
    """However the work is cut, and whatever the other rows ask for."""
    logits = torch.randn(4, 5000, generator=torch.Generator().manual_seed(3)).bfloat16()
    settings = settings_of(4, top_p=0.9)
    first = {name: values[:1] for name, values in settings.items()}
    alone = kernels.sample_rows(logits[:1], **first)
    settings["top_k_B"] = torch.tensor([0, 7, 1, 4000], dtype=torch.int32)
    settings["temperature_B"][2] = 0.0
    settings["bias_BV"] = torch.randn(4, 5000)
    settings["bias_BV"][0] = 0.0
    for config in (SamplingConfig(16, 4), SamplingConfig(64, 8, num_stages=2, pieces=2)):
        together = kernels.sample_rows(logits, config=config, **settings)
        assert together[0] == alone[0]


def test_penalties_do_what_their_names_say() -> None:
    logits = torch.tensor([2.0, -2.0, 2.0, 2.0])
    counts = torch.tensor([0, 3, 1, 0], dtype=torch.int32)
    seen = torch.tensor([True, False, False, False])
    adjusted = adjusted_logits(
        logits,
        repetition=2.0,
        presence=0.5,
        frequency=0.25,
        output_counts_V=counts,
        prompt_seen_V=seen,
        bias_V=torch.tensor([0.0, 0.0, 0.0, -1.0]),
    )
    assert adjusted.tolist() == [1.0, -4.0 - 0.5 - 0.75, 1.0 - 0.5 - 0.25, 1.0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("run", [sample_rows, kernels.sample_rows])
def test_a_nan_is_chosen_so_that_it_is_seen(run, temperature: float) -> None:  # type: ignore[no-untyped-def]
    logits = torch.randn(2, 600)
    logits[1, 555] = float("nan")
    settings = (torch.full((2,), temperature), torch.tensor([1, 2]), torch.tensor([3, 4]))
    filters = {"top_k_B": torch.tensor([5, 5], dtype=torch.int32), "top_p_B": torch.ones(2) * 0.9}
    assert run(logits, *settings)[1] == 555
    assert run(logits, *settings, **filters)[1] == 555


def test_ways_worth_timing_keep_a_groups_threads_together() -> None:
    """A tile has a group for each eight threads at least, or parts of groups meet across warps."""
    for name in ("sm_90", "gfx942"):
        for rows in (1, 64, 512):
            ways = search_space(rows, 501, torch.bfloat16, TARGETS[name])
            assert len(set(ways)) == len(ways) > 3
            assert all(way.tile * 8 >= way.num_warps * TARGETS[name].warp_size for way in ways)
