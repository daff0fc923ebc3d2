"""A quantized checkpoint parsed from its headers alone: which of its tensors make up which matrix,
which are plain, and which are neither. `Decoded` is the same checkpoint with plain weights under
the names it would have had unquantized.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator
from pathlib import Path

from torch import Tensor

from ridgeline.models.checkpoint import Checkpoint
from ridgeline.models.checkpoint.base import TensorInfo
from ridgeline.progress import Progress
from ridgeline.quantization.files.matrix import StoredMatrix, decoded_matrix
from ridgeline.quantization.files.stored import MatrixLayout

# Tensors that are not weights: scales of inputs and outputs (not used, see scaled.py) and of the KV
# cache (`kv_scales`), what a layout reads separately, and zero points of symmetric codes, which
# some tools write anyway.
BESIDE = (
    "input_scale",
    "input_zero_point",
    "input_global_scale",
    "input_scale_ub",
    "activation_scale",
    "activation_scale_ub",
    "output_scale",
    "output_zero_point",
    "weight_shape",
    "weight_zero_point",
)
INPUT_SCALES = ("input_scale", "input_global_scale", "activation_scale")
KV = ("k_scale", "v_scale", "q_scale", "k_zero_point", "v_zero_point")


class QuantizedCheckpoint:
    """What `open_quantized` returns (read.py)."""

    def __init__(self, checkpoint: Checkpoint, layouts: list[MatrixLayout]) -> None:
        self.checkpoint = by_layer(checkpoint)
        self.layouts = {layout.name: layout for layout in layouts}
        used = {name for layout in layouts for name in layout.tensors.values()}
        self.plain = [
            name
            for name in checkpoint.tensors
            if name not in used and name.rpartition(".")[2] not in (*BESIDE, *KV)
        ]

    @property
    def names(self) -> list[str]:
        """The tensor names of the same checkpoint unquantized."""
        return [*self.plain, *self.layouts]

    def notes(self) -> list[str]:
        """Notes for the user: what is expanded and why, what is not used."""
        reasons = [layout.expanded for layout in self.layouts.values() if layout.expanded]
        notes = [
            f"{reasons.count(reason)} matrices are expanded to plain weights: {reason}"
            for reason in dict.fromkeys(reasons)
        ]
        fixed = [name for name in self.checkpoint.tensors if name.endswith(INPUT_SCALES)]
        if fixed:
            notes.append(
                f"{len(fixed)} fixed input scales are ignored: scales are computed from the inputs"
            )
        return notes

    def read(
        self, names: Collection[str] | None = None, progress: Progress | None = None
    ) -> Iterator[tuple[str, StoredMatrix | Tensor]]:
        """A matrix comes as soon as the last of its tensors was read; plain tensors may view a
        mapped file, see Checkpoint.read.
        """
        wanted = [name for name in self.names if names is None or name in names]
        layout_of = {
            stored: self.layouts[name]
            for name in wanted
            if name in self.layouts
            for stored in self.layouts[name].tensors.values()
        }
        waiting: dict[str, dict[str, Tensor]] = {}
        stored_names = [name for name in wanted if name not in self.layouts] + list(layout_of)
        for stored, tensor in self.checkpoint.read(stored_names, progress):
            layout = layout_of.get(stored)
            if layout is None:
                yield stored, tensor
                continue
            have = waiting.setdefault(layout.name, {})
            have[stored] = tensor.clone()
            if len(have) == len(layout.tensors):
                del waiting[layout.name]
                yield layout.name, layout.make({k: have[v] for k, v in layout.tensors.items()})

    def kv_scales(self) -> dict[str, Tensor]:
        """Scales of cached keys and values by their stored names; empty where there are none."""
        names = [
            name for name in self.checkpoint.tensors if name.endswith((".k_scale", ".v_scale"))
        ]
        return {name: scale.float().clone() for name, scale in self.checkpoint.read(names)}


def by_layer(checkpoint: Checkpoint) -> Checkpoint:
    """The same checkpoint, read layer by layer: files are often sorted by dtype, and all their
    codes would wait in memory for the first scale.
    """
    layers: dict[tuple[Path, str], list[TensorInfo]] = {}
    for info in checkpoint.tensors.values():
        layers.setdefault((info.file, info.name.rpartition(".")[0]), []).append(info)
    ordered = copy.copy(checkpoint)
    ordered.tensors = {info.name: info for infos in layers.values() for info in infos}
    return ordered


class Decoded(Checkpoint):
    """The checkpoint as if it had never been quantized: the same names with plain weights."""

    def __init__(self, quantized: QuantizedCheckpoint) -> None:
        self.quantized = quantized
        inner = quantized.checkpoint
        tensors = {name: inner.tensors[name] for name in quantized.plain}
        for layout in quantized.layouts.values():
            first = inner.tensors[next(iter(layout.tensors.values()))]
            tensors[layout.name] = TensorInfo(layout.name, layout.shape, "fp32", first.file)
        super().__init__(inner.path, inner.metadata, tensors)
        self.format = inner.format

    def read(
        self, names: Collection[str] | None = None, progress: Progress | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        self._select(names)
        for name, stored in self.quantized.read(names, progress):
            yield name, decoded_matrix(stored) if isinstance(stored, StoredMatrix) else stored

    def _read_file(
        self, file: Path, infos: list[TensorInfo]
    ) -> Iterator[tuple[TensorInfo, Tensor]]:
        raise AssertionError("read does it all")
