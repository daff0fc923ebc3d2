"""What a recipe switches for the time of a step is switched then, put back, and refused where it
means nothing.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from ridgeline.engine import Engine, Sampling
from ridgeline.engine.loading.layer_speed import measured_choices
from ridgeline.engine.loading.switches import check_switches, switches
from ridgeline.errors import UnsupportedError
from ridgeline.kernels import autotune, extension
from ridgeline.models.shapes import describe_shape, random_model
from ridgeline.quantization.scheme import parse_scheme
from ridgeline.recipe import Parallel, Recipe

FP32 = Recipe(dtype="fp32")


def precision() -> str:
    return torch.backends.cuda.matmul.fp32_precision


def test_tf32_is_on_inside_and_put_back() -> None:
    before = precision()

    def fail() -> None:
        with switches(replace(FP32, tf32=True))():
            assert precision() == "tf32"
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert precision() == before


def test_untuned_choices_count_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autotune, "_device_name", lambda index: "some gpu")
    monkeypatch.setattr(autotune, "_ranked", lambda *_: [{"tiles": 4}])
    monkeypatch.setattr(autotune, "_beaten_by", lambda *_: "cublas")
    monkeypatch.setattr(extension, "_library", lambda *_: "built")
    gpu = torch.device("cuda:0")

    def found() -> tuple[Any, ...]:
        return (
            autotune.chosen("op", "key", gpu),
            autotune.beaten_by("op", "key", gpu),
            extension.library("op"),
        )

    assert found() == ({"tiles": 4}, "cublas", "built")
    with switches(Recipe(tuned=False))():
        assert found() == (None, None, None)
    assert found() == ({"tiles": 4}, "cublas", "built")


def test_a_step_runs_inside_the_switches(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(random_model("tiny", torch.float32, "cpu"), num_pages=64)
    engine.runner.switches = switches(replace(FP32, tf32=True))
    seen = []
    plain = engine.runner._run
    monkeypatch.setattr(engine.runner, "_run", lambda *a: (seen.append(precision()), plain(*a))[1])
    engine.generate([[1, 2, 3]], Sampling(max_tokens=2))
    assert set(seen) == {"tf32"}
    assert precision() != "tf32"


def test_times_of_untuned_layers_are_kept_apart(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path))
    config = describe_shape("tiny").config
    keys: list[str] = []

    class Kept:
        def __init__(self, device: str) -> None: ...

        def get(self, key: str, rows: int) -> Any:
            keys.append(key)
            return False

        def save(self) -> None: ...

    monkeypatch.setattr("ridgeline.engine.loading.layer_speed._Kept", Kept)
    about = (config, parse_scheme("int8"), (1,), torch.bfloat16, "cuda:0")
    measured_choices(*about)
    with switches(Recipe(tuned=False))():
        measured_choices(*about)
    first, second = keys[: len(keys) // 2], keys[len(keys) // 2 :]
    assert first
    assert not set(first) & set(second)


@pytest.mark.parametrize(
    ("recipe", "device", "word"),
    [
        (replace(FP32, tf32=True), "cpu", "CPU"),
        (Recipe(dtype="bf16", tf32=True), "cuda:0", "bf16"),
        (Recipe(tuned=False), "cpu", "CPU"),
        (replace(FP32, tf32=True, deterministic=True), "cuda:0", "deterministic"),
        (Recipe(tuned=False, parallel=Parallel(tensor=2)), "cuda:0", "several ranks"),
    ],
)
def test_what_means_nothing_is_refused(recipe: Recipe, device: str, word: str) -> None:
    with pytest.raises(UnsupportedError, match=word):
        check_switches(recipe, device)


def test_the_engine_refuses_tf32_on_a_cpu() -> None:
    with pytest.raises(UnsupportedError, match="tf32"):
        Engine(random_model("tiny", torch.float32, "cpu"), replace(FP32, tf32=True))
