"""Codes of every matrix in every scheme it may get, from one pass over the data, so that mixtures
of schemes can be assembled without calibrating again.

A matrix is calibrated on the original's activations, whatever the matrices before it become: its
codes then depend only on the matrix and its scheme. That holds for methods that round each matrix
by itself (rtn, gptq); where scales are folded, codes depend on the whole block (see
calibration.py). Codes are kept on the host, or in files of a work folder.

    known = find_alternatives(model, batches, {"layers.0.mlp.down": [int8, int4]}, Gptq())
    known.codes({"layers.0.mlp.down": int4}), known.reports({"layers.0.mlp.down": int4})
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from ridgeline.models import Transformer
from ridgeline.progress import Progress
from ridgeline.quantization.blocks import BlockWalk
from ridgeline.quantization.calibrating.calibration import MIN_TOKENS, check_finite, named, treat
from ridgeline.quantization.calibrating.work import (
    LayerResult,
    MatrixReport,
    Results,
    codes_on,
    fingerprint,
)
from ridgeline.quantization.methods.base import Calibrated, Method
from ridgeline.quantization.scheme import Codes, Scheme
from ridgeline.quantization.statistics import collect, matrices

WEIGHT = ".weight"
Candidates = Mapping[str, Sequence[Scheme]]  # by projection: layers.0.mlp.down


class Alternatives:
    """What was found, by projection and scheme."""

    def __init__(self, results: Results) -> None:
        self._results = results

    def codes(self, schemes: Mapping[str, Scheme]) -> dict[str, tuple[Codes, Scheme]]:
        """Of these projections, each in its scheme."""
        codes = {}
        for index, wanted in _by_layer(schemes).items():
            layer = self._results.layer(index)
            for name, scheme in wanted.items():
                codes[name] = (layer.codes[_key(name, scheme)], scheme)
        return codes

    def reports(self, schemes: Mapping[str, Scheme]) -> list[MatrixReport]:
        wanted = {(name + WEIGHT, scheme.name) for name, scheme in schemes.items()}
        return [row for row in self._results.reports if (row.name, row.scheme) in wanted]


@torch.no_grad()
def find_alternatives(
    model: Transformer,
    batches: Iterable[Tensor],
    candidates: Candidates,
    method: Method,
    *,
    work: Path | None = None,
    progress: Progress | None = None,
) -> Alternatives:
    """Each scheme must fit its projection. A stopped run continues from `work`."""
    assert not method.folds, f"codes by {method.name} depend on the whole block"
    check_finite(model)
    tokens = list(batches)
    if work is not None:
        pairs = {_key(name, scheme): scheme for name in candidates for scheme in candidates[name]}
        work = work / fingerprint(model, tokens, pairs, method, MIN_TOKENS)
    results = Results(model.config.num_layers, {}, work)
    walk = BlockWalk(model, tokens)
    for index in range(results.num_layers):
        if progress is not None:
            progress("quantizing", index, results.num_layers)
        if results.has(index):
            walk.advance(walk.copy_block(index))
        else:
            results.put(index, _layer(index, walk, candidates, method))
    if progress is not None:
        progress("quantizing", results.num_layers, results.num_layers)
    return Alternatives(results)


def _layer(index: int, walk: BlockWalk, candidates: Candidates, method: Method) -> LayerResult:
    """All codes of one block, through which the data goes once."""
    block = walk.copy_block(index)
    statistics = collect(block, walk, advance=True)
    codes: dict[str, Codes] = {}
    reports: list[MatrixReport] = []
    for own_name, weight_OD in matrices(block).items():
        name = f"layers.{index}.{own_name.removesuffix(WEIGHT)}"
        weights = {own_name: weight_OD.float()}
        for scheme in candidates.get(name, ()):
            calibrated = Calibrated(block, weights, statistics, {own_name: scheme}, MIN_TOKENS)
            result, report = treat(own_name, calibrated, scheme, method)
            assert isinstance(result, Codes), f"{scheme.name} does not fit {name}"
            codes[_key(name, scheme)] = codes_on(result, "cpu")
            reports.append(named(report, index))
    return LayerResult(codes, {}, reports)


def _key(name: str, scheme: Scheme) -> str:
    return f"{name} {scheme.name}"


def _by_layer(schemes: Mapping[str, Scheme]) -> dict[int, dict[str, Scheme]]:
    by_layer: dict[int, dict[str, Scheme]] = {}
    for name, scheme in schemes.items():
        by_layer.setdefault(int(name.split(".")[1]), {})[name] = scheme
    return by_layer
