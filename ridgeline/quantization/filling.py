"""Builds a model whose parameters take memory only as their parts arrive, so that weights that are
quantized while loading, or stored as codes, are never all held in full precision.

    filling = Filling(build_model(config, dtype, "meta"), description, "cuda:0")
    whole = filling.put(part, tensor)       # the parameter, once its last part has arrived
    filling.set(part.parameter, whole)
    model = filling.finished()
"""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor, nn

from ridgeline.models import Transformer
from ridgeline.models.families import Description, WeightPart, parts


class Filling:
    def __init__(
        self, model: Transformer, description: Description, device: str | torch.device
    ) -> None:
        self.model, self.device = model, device
        self.dtype = model.embed.weight.dtype
        self._shapes = {name: value.shape for name, value in model.named_parameters()}
        names = (part.parameter for part in parts(description.config, description.names))
        self._missing = Counter(names)
        self._open: dict[str, Tensor] = {}

    def put(self, part: WeightPart, tensor: Tensor) -> Tensor | None:
        """Copy a part into its parameter; returns (and lets go of) the parameter once it is
        complete.
        """
        name = part.parameter
        if name not in self._open:
            shape = self._shapes[name]
            self._open[name] = torch.empty(shape, dtype=self.dtype, device=self.device)
        self._open[name][part.index].copy_(tensor)
        self._missing[name] -= 1
        return None if self._missing[name] else self._open.pop(name)

    def set(self, name: str, tensor: Tensor) -> None:
        """Set a complete parameter. A bias may come before or after its projection."""
        owner, _, own_name = name.rpartition(".")
        parameter = nn.Parameter(tensor, requires_grad=False)
        setattr(self.model.get_submodule(owner), own_name, parameter)

    def finished(self) -> Transformer:
        if self.model.config.tied_embeddings:
            self.model.head.weight = self.model.embed.weight
        meta = [name for name, value in self.model.named_parameters() if value.is_meta]
        assert not meta, f"every parameter has its parts: {meta}"
        return self.model
