"""Codes for every scheme of a matrix from one pass: the same as each alone on the original's
activations, and a stopped run goes on.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from calibrated import outlier_model, token_batches

from ridgeline.models import Transformer
from ridgeline.quantization.blocks import BlockWalk
from ridgeline.quantization.calibrating import alternatives
from ridgeline.quantization.calibrating.alternatives import find_alternatives
from ridgeline.quantization.calibrating.calibration import quantize_model
from ridgeline.quantization.linear import quantizable
from ridgeline.quantization.methods import Gptq, Rtn
from ridgeline.quantization.scheme import parse_scheme
from ridgeline.quantization.statistics import collect, matrices

INT8, INT4 = parse_scheme("int8"), parse_scheme("int4-g32")


def candidates(model: Transformer) -> dict[str, list[Any]]:
    return {name: [INT8, INT4] for name in quantizable(model)} | {"layers.0.attn.out": [INT4]}


def test_each_is_what_the_method_makes_of_the_original() -> None:
    """In the second layer too, whatever the first would become."""
    model, batches, method = outlier_model(), token_batches(), Gptq()
    known = find_alternatives(model, batches, candidates(model), method)
    walk = BlockWalk(model, batches)
    for index in range(2):
        block = walk.copy_block(index)
        statistics = collect(block, walk)
        for own_name, weight_OD in matrices(block).items():
            name = f"layers.{index}.{own_name.removesuffix('.weight')}"
            for scheme in candidates(model)[name]:
                codes, of = known.codes({name: scheme})[name]
                expected = method.apply(weight_OD, statistics[own_name], scheme)
                assert of == scheme
                assert torch.equal(codes.values, expected.values)
                assert torch.equal(codes.grid.scale, expected.grid.scale)
        walk.advance(block)
    with pytest.raises(KeyError):
        known.codes({"layers.0.attn.out": INT8})


def test_rounding_alone_is_the_same_as_ever() -> None:
    model, batches = outlier_model(), token_batches(1)
    known = find_alternatives(model, batches, candidates(model), Rtn())
    schemes = dict.fromkeys(quantizable(model), INT4)
    alone = quantize_model(model, batches, INT4, Rtn())
    found = {f"{name}.weight": codes for name, (codes, _) in known.codes(schemes).items()}
    tensors = dict(alone.tensors())
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name].values, tensors[name].values) for name in found)
    (first, *_), (same, *_) = known.reports(schemes), alone.reports
    assert (first.name, first.scheme, first.error_db) == (same.name, "int4-g32", same.error_db)
    assert len(known.reports(schemes)) == len(schemes)


def test_a_stopped_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, batches = outlier_model(layers=3), token_batches(1)
    about = (model, batches, candidates(model), Gptq(clip=False))
    made: list[int] = []
    layer = alternatives._layer

    def stops(index: int, *more: Any) -> Any:
        if index == 2 and not made.count(1) > 1:
            made.append(1)
            raise KeyboardInterrupt
        made.append(index)
        return layer(index, *more)

    monkeypatch.setattr(alternatives, "_layer", stops)
    with pytest.raises(KeyboardInterrupt):
        find_alternatives(*about, work=tmp_path)
    assert made == [0, 1, 1]
    again = find_alternatives(*about, work=tmp_path)
    assert made == [0, 1, 1, 2]
    schemes = dict.fromkeys(quantizable(model), INT4)
    whole = find_alternatives(*about)
    assert again.reports(schemes) == whole.reports(schemes)
    ours, theirs = again.codes(schemes), whole.codes(schemes)
    assert all(torch.equal(ours[name][0].values, theirs[name][0].values) for name in schemes)
