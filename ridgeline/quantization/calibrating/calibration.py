"""`quantize_model`: quantizes a model's matrices block by block, on any iterable of token tensors.

For each block: its inputs go through it once and are watched (statistics.py), the method folds and
rounds, the result is kept (work.py), and the inputs go through the rounded block to become the next
block's inputs; methods that calibrate on the original's activations skip that. The device holds one
block, its statistics and, unless they are kept on the host, the activations; the model itself may
be on the host and is never changed. A stopped run continues at the first layer that its work folder
lacks, and ends with the same bytes.

data/calibration_text.py provides the tokens.

    results = quantize_model(model, batches, parse_scheme("int4-g128"), Gptq(), device="cuda",
                             work=Path("work"))
    for report in results.reports: print(report.name, report.error_db)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from ridgeline.errors import CheckpointError, UsageError
from ridgeline.models import Transformer
from ridgeline.models.checkpoint.base import shorten
from ridgeline.models.transformer import Block
from ridgeline.progress import Progress
from ridgeline.quantization.blocks import BlockWalk
from ridgeline.quantization.calibrating.work import (
    LayerResult,
    MatrixReport,
    Results,
    codes_on,
    fingerprint,
    write_into,
)
from ridgeline.quantization.methods.base import Calibrated, Method
from ridgeline.quantization.scheme import Codes, Scheme, decode
from ridgeline.quantization.statistics import Statistics, collect, error_db, matrices

MIN_TOKENS = 128  # with fewer, an expert is rounded to nearest
SchemeOf = Callable[[str], Scheme | None]  # by a matrix's full name: layers.3.attn.qkv.weight


def quantize_model(
    model: Transformer,
    batches: Iterable[Tensor],
    scheme: Scheme | SchemeOf | None,
    method: Method,
    *,
    device: str | torch.device | None = None,
    work: Path | None = None,
    keep_on_host: bool = False,
    min_tokens: int = MIN_TOKENS,
    progress: Progress | None = None,
) -> Results:
    """`scheme` is one for all matrices, or says for each which (None: it stays). Without a scheme,
    methods that prune leave floats. Embeddings, head, routers and norms keep their dtype.
    """
    check_finite(model)
    schemes = {name: _scheme_of(scheme, name) for name in matrix_names(model)}
    if not method.prunes and not any(schemes.values()):
        raise UsageError(
            f"{method.name} needs a quantization scheme for at least one matrix; give a scheme"
        )
    tokens = list(batches)
    if work is not None:
        work = work / fingerprint(model, tokens, schemes, method, min_tokens)
    results = Results(model.config.num_layers, schemes, work)
    walk = BlockWalk(model, tokens, device, keep_on_host)
    meter = _Meter(progress, results, walk.num_batches, method)
    for index in range(results.num_layers):
        block = walk.copy_block(index)
        layer_schemes = _inside(schemes, index)
        has_advanced = False
        if results.has(index):
            result = results.layer(index)
        else:
            result = _quantize_block(block, walk, layer_schemes, method, index, min_tokens, meter)
            results.put(index, result)
            has_advanced = method.sees_original
        if index + 1 < results.num_layers and not has_advanced:
            if not method.sees_original:
                write_into(block, result, layer_schemes)
            walk.advance(block, meter.step)
    meter.finish()
    return results


def check_finite(model: Transformer) -> None:
    """An error that names every parameter with a NaN or an infinity."""
    wrong = [
        name for name, value in model.named_parameters() if not bool(torch.isfinite(value).all())
    ]
    if wrong:
        raise CheckpointError(
            f"weights that are NaN or infinite cannot be quantized: {shorten(wrong)}; "
            "get the checkpoint again"
        )


def matrix_names(model: Transformer) -> list[str]:
    """Full names of all matrices that can be quantized."""
    names = []
    for index, block in enumerate(model.layers):
        assert isinstance(block, Block)
        names += [f"layers.{index}.{name}" for name in matrices(block)]
    return names


def _scheme_of(scheme: Scheme | SchemeOf | None, name: str) -> Scheme | None:
    return scheme(name) if callable(scheme) else scheme


def _inside(schemes: Mapping[str, Scheme | None], index: int) -> dict[str, Scheme | None]:
    """Those of one block, by the names inside it."""
    prefix = f"layers.{index}."
    return {
        name.removeprefix(prefix): scheme
        for name, scheme in schemes.items()
        if name.startswith(prefix)
    }


@torch.no_grad()
def _quantize_block(
    block: Block,
    walk: BlockWalk,
    schemes: dict[str, Scheme | None],
    method: Method,
    index: int,
    min_tokens: int,
    meter: _Meter,
) -> LayerResult:
    before = {name: value.detach().clone() for name, value in _others(block).items()}
    original = {name: value.detach().float() for name, value in matrices(block).items()}
    statistics = collect(block, walk, meter.step, advance=method.sees_original)
    fitting = {
        name: scheme if _fits(method, original[name], scheme) else None
        for name, scheme in schemes.items()
    }
    calibrated = Calibrated(block, dict(original), statistics, fitting, min_tokens)
    method.fold(calibrated)
    codes: dict[str, Codes] = {}
    floats = {
        name: value.detach().cpu()
        for name, value in _others(block).items()
        if not torch.equal(value, before[name])
    }
    reports = []
    for name, weight_OD in calibrated.weights.items():
        treated, report = treat(name, calibrated, schemes[name], method)
        reports.append(named(report, index))
        if isinstance(treated, Codes):
            codes[name] = codes_on(treated, "cpu")
        elif treated is not None or weight_OD is not original[name]:
            value = weight_OD if treated is None else treated
            floats[name] = value.to(block.attn.qkv.weight.dtype).cpu()
        meter.step()
    return LayerResult(codes, floats, reports)


def treat(
    name: str, calibrated: Calibrated, wanted: Scheme | None, method: Method
) -> tuple[Codes | Tensor | None, MatrixReport]:
    """A matrix's codes, or floats, or None where it stays; and its row of the table."""
    weight_OD, statistics = calibrated.weights[name], calibrated.statistics[name]
    scheme, tokens = calibrated.schemes[name], statistics.num_tokens
    if not _fits(method, weight_OD, wanted):
        note = f"{list(weight_OD.shape)} has no room for {_what(wanted, method)}"
        return None, MatrixReport(name, None, None, None, tokens, note)
    if scheme is None and not method.prunes:
        return None, MatrixReport(name, None, None, None, tokens)
    known, note = calibrated.is_known(name), ""
    if known:
        result = method.apply(weight_OD, statistics, scheme)
    else:
        result = method.without_data(weight_OD, scheme)
        note = f"only {tokens} tokens were seen: rounded without data"
    decoded_OD = result if isinstance(result, Tensor) else decode(result, _sure(scheme))
    error = error_db(weight_OD, decoded_OD, statistics, scheme) if tokens else None
    used = method.name if known else ("magnitude" if method.prunes else "rtn")
    scheme_name = None if scheme is None else scheme.name
    return result, MatrixReport(name, scheme_name, used, error, tokens, note)


def _fits(method: Method, weight_OD: Tensor, scheme: Scheme | None) -> bool:
    num_outputs, depth = weight_OD.shape
    return method.fits(num_outputs, depth, scheme)


def _sure(scheme: Scheme | None) -> Scheme:
    assert scheme is not None, "codes have a scheme"
    return scheme


def _what(scheme: Scheme | None, method: Method) -> str:
    return method.name if scheme is None else f"{scheme.name} by {method.name}"


def _others(block: Block) -> dict[str, Tensor]:
    """Parameters that are not quantized: norms, biases, routers."""
    taken = {value.data_ptr() for value in matrices(block).values()}
    return {
        name: value for name, value in block.named_parameters() if value.data_ptr() not in taken
    }


def named(report: MatrixReport, index: int) -> MatrixReport:
    values = vars(report) | {"name": f"layers.{index}.{report.name}"}
    return MatrixReport(**values)


class _Meter:
    """Progress in even steps, so that the time left can be told: a batch through a block is one,
    a matrix is one.
    """

    def __init__(
        self, progress: Progress | None, results: Results, num_batches: int, method: Method
    ) -> None:
        layers = results.num_layers
        fresh = sum(not results.has(index) for index in range(layers))
        inside = sum(name.startswith("layers.0.") for name in results.schemes)
        passes = layers if method.sees_original else layers - 1 + fresh
        self.total = passes * num_batches + fresh * inside
        self.progress, self.done = progress, 0

    def step(self) -> None:
        self.done = min(self.done + 1, self.total)
        if self.progress is not None:
            self.progress("quantizing", self.done, self.total)

    def finish(self) -> None:
        self.done = self.total - 1
        self.step()


__all__ = ["MIN_TOKENS", "Results", "Statistics", "check_finite", "quantize_model"]
