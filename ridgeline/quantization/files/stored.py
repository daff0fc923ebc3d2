"""How a matrix is stored: which tensors of the checkpoint belong to it and how they become weights.
Each format has its own file; this one has what they share, above all the checks, which need only
the headers and so run before any data is read.

    layout = MatrixLayout("model.layers.0.mlp.down_proj.weight", (576, 1536), tensors, make)
    layout.make({"qweight": …, "scales": …})  # a StoredMatrix, or a tensor where no scheme matches
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from ridgeline.errors import CheckpointError
from ridgeline.formats.dtypes import dtype_name
from ridgeline.formats.words import e8m0_values
from ridgeline.models.checkpoint.base import TensorInfo
from ridgeline.quantization.files.matrix import StoredMatrix
from ridgeline.quantization.scheme import FP8

Tensors = dict[str, Tensor]
FP8_NAME = dtype_name(FP8)
SCALE_TYPES = ("fp32", "fp16", "bf16", "fp8_e8m0")


@dataclass(frozen=True)
class MatrixLayout:
    """One matrix in a checkpoint."""

    name: str  # of the weight, as an unquantized checkpoint would have it
    shape: tuple[int, int]  # outputs, depth
    tensors: Mapping[str, str]  # the name `make` knows it by → the one it is stored under
    make: Callable[[Tensors], StoredMatrix | Tensor]
    expanded: str = ""  # why it becomes plain weights; empty where codes are kept
    scheme: str = ""  # of kept codes, as far as headers tell; empty for plain weights


class StoredModule:
    """The tensors of one layer, by the last part of their names."""

    def __init__(self, name: str, infos: Mapping[str, TensorInfo]) -> None:
        self.name = name
        self.infos = infos

    def __contains__(self, last: object) -> bool:
        return last in self.infos

    def dtype(self, last: str) -> str:
        return self.infos[last].dtype if last in self.infos else ""

    def needs(self, last: str, *dtypes: str) -> tuple[int, ...]:
        """The shape of a tensor that must be there, in one of these types."""
        if last not in self.infos:
            here = ", ".join(self.infos)
            self.wrong(f"has no {last}, which its quantized weight needs; it has {here}")
        info = self.infos[last]
        if info.dtype not in dtypes:
            self.wrong(f"has {last} in {info.dtype}; expected {' or '.join(dtypes)}")
        return info.shape

    def matrix_shape(self, last: str, *dtypes: str) -> tuple[int, int]:
        shape = self.needs(last, *dtypes)
        if len(shape) != 2 or 0 in shape:
            self.wrong(f"has {last} of shape {list(shape)}; expected rows and columns")
        return shape[0], shape[1]

    def expects(self, last: str, *shapes: tuple[int, ...]) -> None:
        """The tensor's shape must be one of these."""
        actual = self.infos[last].shape
        if actual not in shapes:
            allowed = " or ".join(str(list(shape)) for shape in shapes)
            self.wrong(f"has {last} of shape {list(actual)}; expected {allowed}")

    def groups(self, last: str, depth: int, num_groups: int) -> int:
        """How many columns share a scale, of which there are `num_groups` in a row."""
        if num_groups < 1 or depth % num_groups:
            self.wrong(
                f"has {num_groups} groups in {last} for {depth} columns, which does not "
                "divide evenly"
            )
        return depth // num_groups

    def wrong(self, what: str) -> NoReturn:
        raise CheckpointError(f"{self.name} {what}")

    def layout(
        self,
        shape: tuple[int, int],
        names: list[str],
        make: Callable[[Tensors], StoredMatrix | Tensor],
        expanded: str = "",
        scheme: str = "",
    ) -> MatrixLayout:
        tensors = {last: self.infos[last].name for last in names if last in self.infos}
        kept = "" if expanded else scheme
        return MatrixLayout(f"{self.name}.weight", shape, tensors, make, expanded, kept)


def finite_scale(scale: Tensor, name: str) -> Tensor:
    """The scale in fp32 with two dims; an error where one is NaN or infinite."""
    if scale.dtype == torch.float8_e8m0fnu:
        scale = e8m0_values(scale.view(torch.uint8))
    scale = scale.float()
    if not bool(scale.isfinite().all()):
        count = int((~scale.isfinite()).sum())
        raise CheckpointError(f"{name} has {count} scales that are NaN or infinite")
    if scale.dim() == 0:
        return scale.view(1, 1)
    return scale.unsqueeze(1) if scale.dim() == 1 else scale


def field(config: Mapping[str, Any], name: str, default: Any, *allowed: Any) -> Any:
    """A field of a quantization_config that must have one of these values."""
    value = config.get(name, default)
    if value not in allowed or isinstance(value, bool) != isinstance(default, bool):
        known = ", ".join(str(one) for one in allowed)
        raise CheckpointError(f"quantization_config: {name} is {value!r}; it can be {known}")
    return value
