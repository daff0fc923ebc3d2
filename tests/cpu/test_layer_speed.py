"""A scheme through the engine: matrices that are slower when quantized stay plain, and it is said.
Times are the test's own.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import generate, make_folder
from engines import measure_shapes, tiny
from test_choose_layers import Clock

from ridgeline.cli import main
from ridgeline.engine import Engine
from ridgeline.engine.loading.layer_speed import measured_choices, usual_batches
from ridgeline.engine.loading.loading import load
from ridgeline.errors import UsageError
from ridgeline.models.transformer import Linear
from ridgeline.quantization.choose import in_words, slower_shapes
from ridgeline.quantization.linear import QuantizedLinear, quantizable
from ridgeline.quantization.scheme import parse_scheme
from ridgeline.quantization.sizes import read_bytes_per_weight
from ridgeline.recipe import Limits, Recipe

INT8 = parse_scheme("int8")
RECIPE = Recipe(scheme="int8", kernels="reference", limits=Limits(max_batch=2, token_budget=32))


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def use_clock(monkeypatch: pytest.MonkeyPatch, share: Callable[[int, int], float]) -> Clock:
    """For engines; nothing is kept of it."""
    clock = Clock(share)
    monkeypatch.setattr(
        "ridgeline.engine.loading.load_plan.measured_choices",
        lambda *given, **more: measure_shapes(*given, timer=clock),
    )
    return clock


def kinds(engine: Engine) -> dict[str, type]:
    return {name: type(engine.model.get_submodule(name)) for name in quantizable(tiny("llama-mha"))}


def test_a_slower_matrix_stays_plain_and_takes_its_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use_clock(monkeypatch, lambda depth, rows: 1.5 if depth == 80 else 0.5)
    engine = Engine(tiny("llama-mha"), RECIPE, num_pages=8)
    for name, kind in kinds(engine).items():
        assert kind is (Linear if name.endswith(".down") else QuantizedLinear), name
    held = sum(parameter.nbytes for parameter in engine.model.parameters())
    assert engine.memory_plan.bytes_of("weights") == held
    said = "int8 is slower here, so these stay in fp32: 48 x 80 (0.67x at 1 row)"
    assert in_words(engine.choices, "fp32") == said
    assert 1.5 < read_bytes_per_weight(engine.model) < 4
    everything = Engine(tiny("llama-mha"), replace(RECIPE, quantize_all=True), num_pages=8)
    assert set(kinds(everything).values()) == {QuantizedLinear}
    assert everything.choices == ()
    assert in_words(everything.choices, "fp32") is None


def test_where_memory_is_short_all_are_quantized(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    use_clock(monkeypatch, lambda depth, rows: 2.0)
    model, limits = tiny("llama-mha"), replace(RECIPE.limits, max_context=32)
    about = (replace(RECIPE, limits=limits), None, "cpu", None)
    roomy = load(model, *about)
    assert slower_shapes(roomy.choices)
    monkeypatch.setattr("ridgeline.engine.loading.sources.available_memory", lambda device: 0)
    monkeypatch.setattr(
        "ridgeline.engine.loading.sources.shared_bytes",
        lambda *given: 2 * (roomy.plan.needed_bytes - 10_000),
    )
    tight = load(model, *about)
    assert tight.choices == ()
    assert "memory" in caplog.text
    assert tight.plan.bytes_of("weights") < roomy.plan.bytes_of("weights")


def test_times_are_kept_for_the_next_start(cache: Path) -> None:
    clock = Clock(lambda depth, rows: 1.5 if depth == 80 else 0.5)
    config, about = tiny("llama-mha").config, (torch.float32, "cpu")
    more: dict[str, Any] = {"host_kernels": False, "timer": clock}
    state = torch.get_rng_state()
    first = measured_choices(config, INT8, [4, 1], *about, **more)
    assert [choice.quantize for choice in first] == [True, True, True, False]
    assert torch.equal(torch.get_rng_state(), state)  # random layers are not drawn from it
    # 4 shapes at 2 sizes, plain and quantized; what seems slower once more
    assert len(clock.seen) == 4 * 4 + 4
    assert measured_choices(config, INT8, [1, 4], *about, **more) == first
    assert len(clock.seen) == 20
    measured_choices(config, INT8, [1], *about, **more)  # a size of those
    assert len(clock.seen) == 20
    measured_choices(config, INT8, [1, 2], *about, **more)
    assert {rows for *_, rows in clock.seen[20:]} == {2}
    (file,) = (cache / "layers").iterdir()
    document = json.loads(file.read_text())
    file.write_text(json.dumps(document | {"version": "0.0.0"}))
    count = len(clock.seen)
    measured_choices(config, INT8, [1], *about, **more)
    file.write_text("[")
    measured_choices(config, INT8, [1], *about, **more)
    assert len(clock.seen) - count == 2 * (4 * 2 + 2)


@pytest.mark.usefixtures("cache")
def test_one_bad_moment_decides_nothing() -> None:
    moments = iter([3.0, *[0.5] * 100])
    clock = Clock(lambda depth, rows: next(moments))
    more: dict[str, Any] = {"host_kernels": False, "timer": clock}
    config = tiny("llama-mha").config
    choices = measured_choices(config, INT8, [1], torch.float32, "cpu", **more)
    assert all(choice.quantize for choice in choices)


def test_which_batch_sizes() -> None:
    assert usual_batches("cpu") == (1,)
    assert usual_batches("cuda:0") == (1, 16)
    assert usual_batches("cuda:0", 8) == (1,)
    with pytest.raises(UsageError, match="at least 1"):
        measured_choices(tiny("llama-mha").config, INT8, [0], torch.float32, "cpu")


def test_the_command_line_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    use_clock(monkeypatch, lambda depth, rows: 2.0 if depth == 48 else 0.5)
    folder = make_folder(tmp_path / "model")
    assert main(list(generate(folder, "--scheme", "int8", "--json"))) == 0
    assert "48" in json.loads(capsys.readouterr().out)["plain_for_speed"]
    assert main(list(generate(folder, "--scheme", "int8"))) == 0
    assert "int8 is slower here, so these stay in fp32" in capsys.readouterr().err
    loaded = Engine(folder, RECIPE, device="cpu").model.layers[0]
    assert type(loaded.mlp.gate_up) is Linear
    assert type(loaded.mlp.down) is QuantizedLinear
    assert main(list(generate(folder, "--scheme", "int8", "--quantize-all"))) == 0
    assert "slower here" not in capsys.readouterr().err
