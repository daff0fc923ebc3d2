"""What weights without codes are stored in: 16 bits, also where they were computed in fp32. They
are rounded before the model is measured, so that what is saved is what was measured.

bf16, or fp16 where the original has that. A tensor that the original keeps in fp32 beside smaller
ones was kept so for a reason: it stays in fp32 where rounding would change it.

    storage = plain_storage(checkpoint, describe(checkpoint))
    plain = rounded(model, storage, coded={"layers.0.mlp.down"})
    save_quantized(plain, folder, source=path, matrices=codes, storage=storage)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ridgeline.errors import UsageError
from ridgeline.formats.dtypes import parse_dtype
from ridgeline.models import Transformer
from ridgeline.models.checkpoint import Checkpoint
from ridgeline.models.checkpoint.base import TensorInfo
from ridgeline.models.copies import with_kinds
from ridgeline.models.families import Description, parts
from ridgeline.models.weights import canonical_names

WEIGHT = ".weight"


@dataclass(frozen=True)
class PlainStorage:
    dtype: torch.dtype = torch.bfloat16
    exact: frozenset[str] = frozenset()  # parameters that the original keeps in fp32

    def usual(self, computed: torch.dtype) -> torch.dtype:
        """Never wider than what is computed with."""
        return computed if computed.itemsize <= self.dtype.itemsize else self.dtype

    def of(self, name: str, value: Tensor) -> torch.dtype:
        dtype = self.usual(value.dtype)
        if dtype is not value.dtype and name in self.exact and not is_exact(value, dtype):
            return value.dtype
        return dtype

    def kept(self, model: Transformer, coded: Collection[str]) -> list[str]:
        """Parameters without codes that are stored as exactly as the original has them."""
        usual = self.usual(model.embed.weight.dtype)
        named = model.named_parameters()
        plain = ((name, value) for name, value in named if name.removesuffix(WEIGHT) not in coded)
        return [name for name, value in plain if self.of(name, value) is not usual]


def plain_storage(
    checkpoint: Checkpoint, description: Description, requested: str = "auto"
) -> PlainStorage:
    """`requested` is the user's own dtype, which holds for all."""
    if requested != "auto":
        return PlainStorage(parse_dtype(requested))
    usual = most_common_type(checkpoint.tensors.values())
    dtype = torch.float16 if dtype_of(usual) is torch.float16 else torch.bfloat16
    if dtype_of(usual) is torch.float32:
        return PlainStorage(dtype)
    stored = canonical_names(checkpoint.tensors, description)
    exact = {
        part.parameter
        for part in parts(description.config, description.names)
        if part.name in stored
        and dtype_of(checkpoint.tensors[stored[part.name]].dtype) is torch.float32
    }
    return PlainStorage(dtype, frozenset(exact))


def most_common_type(tensors: Iterable[TensorInfo]) -> str:
    """As it is stored, of most weights: `Q4_1`, `bf16`."""
    weights: Counter[str] = Counter()
    for tensor in tensors:
        weights[tensor.dtype] += tensor.num_elements
    return weights.most_common(1)[0][0]


def dtype_of(stored: str) -> torch.dtype | None:
    """None for a GGUF block type."""
    try:
        return parse_dtype(stored)
    except UsageError:
        return None


def is_exact(value: Tensor, dtype: torch.dtype) -> bool:
    return torch.equal(value.to(dtype).to(value.dtype), value)


@torch.no_grad()
def rounded(model: Transformer, storage: PlainStorage, coded: Collection[str]) -> Transformer:
    """A copy with all parameters except codes as they will be stored, in the dtype that they are
    computed in. Those that rounding does not change are shared with `model`; tied ones stay tied.
    """
    copy = with_kinds(model, lambda kind: kind)
    made: dict[int, nn.Parameter] = {}
    for owner, module in copy.named_modules():
        for own_name, value in module._parameters.items():
            name = f"{owner}.{own_name}".removeprefix(".")
            if value is None or name.removesuffix(WEIGHT) in coded:
                continue
            if id(value) not in made:
                made[id(value)] = _rounded(value, storage.of(name, value))
            module._parameters[own_name] = made[id(value)]
    return copy


def _rounded(value: nn.Parameter, dtype: torch.dtype) -> nn.Parameter:
    if dtype is value.dtype or is_exact(value, dtype):
        return value
    return nn.Parameter(value.to(dtype).to(value.dtype), requires_grad=False)
