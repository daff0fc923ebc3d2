"""Products that are timed before anything is guessed, on a CPU; the times are the test's own."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import tiny

from ridgeline.engine.loading.layer_speed import measured_choices
from ridgeline.hardware import Hardware
from ridgeline.hardware.facts import Ceiling
from ridgeline.kernels import host_library
from ridgeline.ladder.guessing import timed_products
from ridgeline.ladder.guessing.answer import default_states
from ridgeline.ladder.guessing.first_guess import first_guess
from ridgeline.ladder.guessing.timed_products import time_products, wanted_products
from ridgeline.ladder.rungs import ClimbFacts
from ridgeline.models.transformer import Linear
from ridgeline.recipe import Recipe, edited, with_auto
from ridgeline.timing import Timing

CEILINGS = {"read_bandwidth": (35e9, "B/s"), "matrix_fp32": (73e9, "FLOP/s")}
CEILINGS |= {"matrix_bf16": (73e9, "FLOP/s")}
ARM = Hardware(
    "arm", "cpu", "cpu", "Neoverse N1", "aarch64", 24 << 30, 2, "6.18",
    ceilings={name: Ceiling(*pair, "measured") for name, pair in CEILINGS.items()},
)  # fmt: skip
LENGTHS = [(128, 256)]


class ScriptedTimes:
    """Seconds of a product, by the dtype and whether it is by codes."""

    def __init__(self, **seconds: float) -> None:
        self.seconds, self.num = seconds, 0

    def __call__(self, fn: Any, device: str, *, inputs: Any) -> Timing:
        self.num += 1
        x_TD, layer = fn.args[0], inputs[0][0]
        dtype = {torch.float32: "fp32", torch.bfloat16: "bf16"}[x_TD.dtype]
        kind = "plain" if isinstance(layer, Linear) else "codes"
        return Timing.from_samples([self.seconds[f"{dtype}_{kind}"]])


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("ridgeline.engine.loading.layer_speed.detect", lambda _: ARM)


def facts() -> ClimbFacts:
    config = tiny("llama-mha").config
    return ClimbFacts(config, ARM, "latency", "setting", longest_prompt=128, request_tokens=256.0)


def filled() -> Recipe:
    recipe = with_auto(Recipe(), facts().config, torch.float32, "cpu")
    return edited(recipe, "kernels", "fused")


def guessed(monkeypatch: pytest.MonkeyPatch, times: ScriptedTimes) -> dict[str, Any]:
    if not host_library.prepare():
        pytest.skip("kernels for CPUs need a C++ compiler")
    monkeypatch.setattr(timed_products, "measured_choices", partial(measured_choices, timer=times))
    start = default_states()[0]
    time_products(facts(), start, filled(), LENGTHS)
    allows = lambda rung, after: rung.chance == 1.0  # noqa: E731
    return dict(first_guess(facts(), LENGTHS, start, filled(), allows).edit)


def test_codes_that_are_fast_in_another_dtype_only_are_guessed_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As two ARM cores have it: int8 is slower than fp32, and faster than bf16."""
    times = ScriptedTimes(fp32_plain=1e-3, fp32_codes=1.5e-3, bf16_plain=8e-4, bf16_codes=5e-4)
    edit = guessed(monkeypatch, times)
    assert (edit["dtype"], edit["scheme"], edit["head"]) == ("bf16", "int8", "int8")
    count = times.num
    assert count > 0
    guessed(monkeypatch, times)
    assert times.num == count  # all is known by then


def test_what_is_slower_is_not_guessed_whatever_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    times = ScriptedTimes(fp32_plain=1e-3, fp32_codes=1.5e-3, bf16_plain=2e-3, bf16_codes=1.9e-3)
    edit = guessed(monkeypatch, times)
    assert not {"dtype", "scheme", "head"} & edit.keys()


def test_one_of_like_schemes_is_timed_and_the_likeliest_first() -> None:
    products = wanted_products(facts(), default_states()[0], filled(), LENGTHS)
    keys = [(one.dtype, one.shape, one.scheme.removeprefix("w8a8-")[:4]) for one in products]
    assert len(keys) == len(set(keys))
    assert {one.dtype for one in products} == {"fp32", "bf16"}
    chances = [one.chance for one in products]
    assert chances == sorted(chances, reverse=True)
    rows = {one.rows for one in products if one.chance == 1.0}
    assert rows == {(1, 128), (1,)}  # of steps and prompts; the head has one row in both


def test_a_slow_machine_leaves_the_rest_to_prediction(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = list[Any]()
    monkeypatch.setattr(host_library, "prepare", lambda: True)
    monkeypatch.setattr(timed_products, "measured_choices", lambda *call: calls.append(call))
    clock = iter([0.0, 1.0, 3.0, 9.0])
    time_products(facts(), default_states()[0], filled(), LENGTHS, clock=lambda: next(clock))
    assert len(calls) == 2


def test_nothing_is_timed_without_kernels_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timed_products, "measured_choices", lambda *_: pytest.fail("timed"))
    reference = edited(filled(), "kernels", "reference")
    time_products(facts(), default_states()[0], reference, LENGTHS)
