"""Results of quantization, layer by layer: in memory, or in files of a work folder from which an
interrupted run continues.

A run has a fingerprint of everything that decides its result (weights, data, schemes, method); its
files are stored under it, one per layer, whole or absent. So runs can share a work folder, and
nothing is written to the model's own folder. int4 codes take a byte each here.

    results = Results(config.num_layers, schemes, Path("work") / fingerprint(...))
    if results.has(3): layer = results.layer(3)
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from ridgeline.errors import CheckpointError
from ridgeline.formats.files import atomic_write
from ridgeline.models import Transformer
from ridgeline.models.checkpoint.safetensors import open_shard
from ridgeline.models.transformer import Block
from ridgeline.quantization.methods.base import Method
from ridgeline.quantization.scheme import Codes, Grid, Scheme, decode
from ridgeline.quantization.statistics import matrices

REPORTS = "reports"  # the one key of a file's metadata: with several, their order would be random
VERSION = 1  # raise it when a method's results change for the same input


@dataclass(frozen=True)
class MatrixReport:
    """One row of the table of errors."""

    name: str  # of our parameter: layers.3.attn.qkv.weight, layers.3.mlp.gate_up.7
    scheme: str | None  # None: it stays in the model's dtype
    method: str | None
    error_db: float | None  # of the outputs on the data, against their power; None where unknown
    num_tokens: int  # that it was calibrated on
    note: str = ""  # what was not done as asked, and why


@dataclass(frozen=True)
class LayerResult:
    codes: dict[str, Codes]  # by the matrix's name inside its block
    floats: dict[str, Tensor]  # other parameters, or matrices, that have changed
    reports: list[MatrixReport]


class Results:
    """The layers of a model, quantized: `layer(3)` reads one from its file, or has it in memory."""

    def __init__(
        self, num_layers: int, schemes: Mapping[str, Scheme | None], folder: Path | None = None
    ) -> None:
        self.num_layers, self.folder = num_layers, folder
        self.schemes = dict(schemes)  # by full name
        self._kept: dict[int, LayerResult] = {}

    def has(self, index: int) -> bool:
        return self._file(index).is_file() if self.folder else index in self._kept

    def layer(self, index: int) -> LayerResult:
        return _read(self._file(index)) if self.folder else self._kept[index]

    def put(self, index: int, result: LayerResult) -> None:
        if self.folder:
            _write(self._file(index), result)
        else:
            self._kept[index] = result

    def _file(self, index: int) -> Path:
        assert self.folder is not None
        return self.folder / f"layer-{index:05d}.safetensors"

    @property
    def reports(self) -> list[MatrixReport]:
        rows = (
            _read_reports(self._file(index)) if self.folder else self._kept[index].reports
            for index in range(self.num_layers)
        )
        return [report for reports in rows for report in reports]

    def tensors(self) -> Iterator[tuple[str, Codes | Tensor]]:
        """Everything that differs from the model, by full name, a layer in memory at a time."""
        for index in range(self.num_layers):
            layer = self.layer(index)
            for name, codes in layer.codes.items():
                yield f"layers.{index}.{name}", codes
            for name, value in layer.floats.items():
                yield f"layers.{index}.{name}", value


def write_into(block: Block, result: LayerResult, schemes: Mapping[str, Scheme | None]) -> None:
    """Make the block what the result says, codes decoded and rounded to the block's dtype."""
    targets: dict[str, Tensor] = {**dict(block.named_parameters()), **matrices(block)}
    with torch.no_grad():
        for name, codes in result.codes.items():
            scheme = schemes[name]
            assert scheme is not None, f"{name} has codes and no scheme"
            targets[name].copy_(decode(codes_on(codes, targets[name].device), scheme))
        for name, value in result.floats.items():
            targets[name].copy_(value)


def codes_on(codes: Codes, device: str | torch.device) -> Codes:
    scale, zero = codes.grid
    grid = Grid(scale.to(device), None if zero is None else zero.to(device))
    return Codes(codes.values.to(device), grid)


def dequantized(model: Transformer, results: Results) -> Transformer:
    """A copy of the model whose weights are what the codes stand for, in the model's dtype."""
    changed = copy.deepcopy(model)
    for index, block in enumerate(changed.layers):
        assert isinstance(block, Block)
        prefix = f"layers.{index}."
        schemes = {name: results.schemes[prefix + name] for name in matrices(block)}
        write_into(block, results.layer(index), schemes)
    return changed


def fingerprint(
    model: Transformer,
    batches: Sequence[Tensor],
    schemes: Mapping[str, Scheme | None],
    method: Method,
    min_tokens: int,
) -> str:
    """24 hex digits that change when anything that decides the result does."""
    digest = hashlib.sha256()
    names = {name: scheme and scheme.name for name, scheme in schemes.items()}
    for word in (VERSION, model.config, names, method, min_tokens):
        digest.update(f"{word!r};".encode())
    for name, tensor in [*model.named_parameters(), *((str(b.shape), b) for b in batches)]:
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)};".encode())
        host = tensor.detach().cpu().contiguous()
        content: Any = host.flatten().view(torch.uint8).numpy()
        digest.update(content)
    return digest.hexdigest()[:24]


def _write(file: Path, result: LayerResult) -> None:
    tensors = {f"float/{name}": value for name, value in result.floats.items()}
    for name, codes in result.codes.items():
        tensors |= {f"values/{name}": codes.values, f"scale/{name}": codes.grid.scale}
        if codes.grid.zero is not None:
            tensors[f"zero/{name}"] = codes.grid.zero
    metadata = {REPORTS: json.dumps([asdict(report) for report in result.reports])}
    content = save({name: value.contiguous() for name, value in tensors.items()}, metadata)
    with atomic_write(file, "wb") as handle:
        handle.write(content)


def _read(file: Path) -> LayerResult:
    with open_shard(file) as shard:
        tensors: dict[str, dict[str, Tensor]] = {"float": {}, "values": {}, "scale": {}, "zero": {}}
        for key in shard.keys():  # noqa: SIM118  (the library's handle is not a mapping)
            kind, name = key.split("/", 1)
            tensors[kind][name] = shard.get_tensor(key)
    codes = {
        name: Codes(values, Grid(tensors["scale"][name], tensors["zero"].get(name)))
        for name, values in tensors["values"].items()
    }
    return LayerResult(codes, tensors["float"], _read_reports(file))


def _read_reports(file: Path) -> list[MatrixReport]:
    with open_shard(file) as shard:
        text = (shard.metadata() or {}).get(REPORTS)
    if text is None:
        raise CheckpointError(f"{file} is not a file of quantized layers; give another work folder")
    return [MatrixReport(**row) for row in json.loads(text)]
