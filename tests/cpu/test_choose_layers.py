"""Which layers stay plain is decided by times: here by a clock that says what the test wants."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from engines import measure_shapes, tiny

from ridgeline.engine.loading.host_model import on_host
from ridgeline.engine.loading.layer_speed import measured_choices
from ridgeline.errors import UsageError
from ridgeline.kernels import host_library
from ridgeline.models.copies import with_kinds
from ridgeline.models.transformer import Linear
from ridgeline.quantization.choose import LayerChoice, ProductTimes, slower_shapes
from ridgeline.quantization.linear import QuantizedLinear
from ridgeline.quantization.nearest import quantize_nearest
from ridgeline.quantization.scheme import parse_scheme
from ridgeline.timing import Timing, measure

INT8 = parse_scheme("int8")


class Clock:
    """Says that a quantized layer takes `share(depth, rows)` of a plain one's time."""

    def __init__(self, share: Callable[[int, int], float]) -> None:
        self.share = share
        self.seen: list[tuple[int, ...]] = []

    def __call__(self, run: Any, device: str, inputs: list[tuple[Any]]) -> Timing:
        (layer,) = inputs[0]
        outcome = run(layer)
        assert outcome.shape[1] == layer.out_features
        rows = len(outcome)
        self.seen.append((layer.out_features, layer.in_features, rows))
        quantized = isinstance(layer, QuantizedLinear)
        return Timing.from_samples([self.share(layer.in_features, rows) if quantized else 1.0])


def choices_of(clock: Clock, sizes: list[int]) -> list[LayerChoice]:
    config = tiny("llama-mha").config
    return measure_shapes(config, INT8, sizes, torch.float32, "cpu", timer=clock)


def test_a_shape_that_is_slower_at_one_size_stays_plain() -> None:
    clock = Clock(lambda depth, rows: 1.5 if depth == 80 and rows == 16 else 0.5)
    choices = choices_of(clock, [16, 1])
    assert {(c.num_outputs, c.depth): c.quantize for c in choices} == {
        (144, 48): True,
        (48, 48): True,
        (160, 48): True,
        (48, 80): False,
    }
    assert [c.reason for c in choices if not c.quantize] == ["0.67x at 16 rows"]
    assert len(clock.seen) == 4 * 2 * 2  # each shape once, at both sizes, plain and quantized
    assert choices[0].to_json()["quantize"] is True
    model = with_kinds(tiny("llama-mha"), lambda kind: kind)
    quantize_nearest(model, INT8, plain=slower_shapes(choices))
    assert type(model.layers[0].mlp.down) is Linear
    assert type(model.layers[0].mlp.gate_up) is QuantizedLinear


def test_a_little_slower_is_noise() -> None:
    assert not ProductTimes(1, 1.0, 1.02).is_slower
    assert ProductTimes(1, 1.0, 1.05).is_slower


def test_a_scheme_that_does_not_fit_is_not_timed() -> None:
    clock = Clock(lambda depth, rows: 0.5)
    config = tiny("llama-mha").config
    scheme = parse_scheme("int4-g64")
    choices = measure_shapes(config, scheme, [1], torch.float32, "cpu", timer=clock)
    assert not clock.seen
    assert {choice.reason for choice in choices} == {"int4-g64 does not fit"}
    assert not any(choice.quantize for choice in choices)


@pytest.mark.parametrize("sizes", [[], [0]])
def test_batch_sizes_are_checked(sizes: list[int]) -> None:
    with pytest.raises(UsageError, match="give numbers of at least 1"):
        measured_choices(tiny("llama-mha").config, INT8, sizes, torch.float32, "cpu")


@pytest.mark.skipif(host_library.find_compiler() is None, reason="no C++ compiler")
def test_real_times_of_the_cpu_kernels() -> None:
    assert host_library.prepare()
    kinds: list[str] = []

    def quick(run: Any, device: str, inputs: Any) -> Timing:
        kinds.append(type(inputs[0][0]).__name__)
        return measure(run, device, inputs=inputs, target_s=0.01, warmup_s=0.0)

    config = tiny("llama-mha").config
    choices = measure_shapes(
        config, INT8, [1, 40], torch.float32, "cpu", ready=on_host, timer=quick
    )
    assert set(kinds) == {"HostLinear", "HostQuantizedLinear"}
    assert all(times.quantized_s > 0 for choice in choices for times in choice.times)
