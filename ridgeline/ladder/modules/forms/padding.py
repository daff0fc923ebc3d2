"""Layers with zeros up to the next multiple of 8, for a GPU's matrix units: inputs get zeros too,
outputs are cut. Zeros add nothing, so outputs are the same but for rounding.

Only layers of exactly these classes: others, those that have hooks, and those that a parent reads
the weight of itself (nn.MultiheadAttention), stay. Reading `weight` of a padded one raises
AttributeError.

    paddable(module)           # {"head": nn.Linear(512, 1001), …}
    pad_layers(copy)           # in place
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from ridgeline.profiling.modules.alignment import ALIGNED, layer_sizes, padded_size


class PaddedLayer(nn.Module):
    """What stands where an nn.Linear or an nn.Conv2d was."""

    def __init__(self, part: nn.Linear | nn.Conv2d) -> None:
        super().__init__()
        sizes = layer_sizes(part)
        assert sizes is not None, type(part)
        self.num_in, self.num_out = sizes
        self.axis = -1 if isinstance(part, nn.Linear) else -3  # of features in inputs and outputs
        self.inner = _padded(part, padded_size(self.num_in), padded_size(self.num_out))
        self.train(part.training)

    def forward(self, x: Tensor) -> Tensor:
        missing = -self.num_in % ALIGNED
        if missing:
            x = functional.pad(x, (0, missing) if self.axis == -1 else (0, 0, 0, 0, 0, missing))
        y: Tensor = self.inner(x)
        return y.narrow(self.axis, 0, self.num_out) if self.num_out % ALIGNED else y


def paddable(module: nn.Module) -> dict[str, nn.Linear | nn.Conv2d]:
    return {
        path: part
        for path, part in module.named_modules()
        if _is_plain(part) and any(size % ALIGNED for size in layer_sizes(part) or ())
    }


def _is_plain(part: nn.Module) -> bool:
    if part._forward_hooks or part._forward_pre_hooks:
        return False
    if type(part) is nn.Linear:
        return True
    return type(part) is nn.Conv2d and part.groups == 1 and part.padding_mode == "zeros"


def pad_layers(module: nn.Module) -> nn.Module:
    """The copy that is given, **in place**; another where it is itself such a layer."""
    for path, part in paddable(module).items():
        if not path:
            return PaddedLayer(part)
        parent_path, _, own_name = path.rpartition(".")
        setattr(module.get_submodule(parent_path), own_name, PaddedLayer(part))
    for layer in module.modules():
        if isinstance(layer, nn.TransformerEncoderLayer):
            layer.activation_relu_or_gelu = 0  # its fused forward would read linear1.weight
    return module


@torch.no_grad()
def _padded(part: nn.Linear | nn.Conv2d, num_in: int, num_out: int) -> nn.Linear | nn.Conv2d:
    weight = part.weight.detach()
    rows, columns = num_out - weight.shape[0], num_in - weight.shape[1]
    edges = (0, 0) * (weight.dim() - 2) + (0, columns, 0, rows)
    made = _like(part, num_in, num_out)
    made.weight = nn.Parameter(functional.pad(weight, edges), part.weight.requires_grad)
    if part.bias is not None:
        bias = functional.pad(part.bias.detach(), (0, rows))
        made.bias = nn.Parameter(bias, part.bias.requires_grad)
    return made


def _like(part: nn.Linear | nn.Conv2d, num_in: int, num_out: int) -> nn.Linear | nn.Conv2d:
    """A layer of these sizes whose weights are nowhere yet."""
    has_bias = part.bias is not None
    if isinstance(part, nn.Linear):
        return nn.Linear(num_in, num_out, has_bias, device="meta")
    return nn.Conv2d(
        num_in,
        num_out,
        part.kernel_size,  # type: ignore[arg-type]
        part.stride,  # type: ignore[arg-type]
        part.padding,  # type: ignore[arg-type]
        part.dilation,  # type: ignore[arg-type]
        bias=has_bias,
        device="meta",
    )
