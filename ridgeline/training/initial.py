"""Weights to begin with where there is no checkpoint: small normal numbers, neutral norms.

What is added to the residual stream is drawn smaller the deeper the model is, so that the stream
keeps its size.

    fill_initial(model, seed=0)
    for name, tensor in initial_tensors(config, seed=0, device="cpu"): ...  # the same, one by one
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ridgeline.models import ModelConfig, Transformer

STD = 0.02
ADDED = ("attn.out.weight", "mlp.down.weight", "mlp.down")  # whose result is added to the stream


@torch.no_grad()
def fill_initial(model: Transformer, seed: int) -> Transformer:
    generator = torch.Generator(device=model.embed.weight.device).manual_seed(seed)
    for name, parameter in model.named_parameters():
        _fill(name, parameter, model.config, generator)
    return model


def initial_tensors(
    config: ModelConfig, seed: int, device: str | torch.device
) -> Iterator[tuple[str, Tensor]]:
    """Those of `fill_initial` on the same kind of device; one of them is held at a time."""
    generator = torch.Generator(device=device).manual_seed(seed)
    with torch.device("meta"):
        model = Transformer(config)
    for name, parameter in model.named_parameters():
        tensor = torch.empty(parameter.shape, dtype=torch.float32, device=device)
        _fill(name, tensor, config, generator)
        yield name, tensor
        del tensor


def _fill(name: str, tensor: Tensor, config: ModelConfig, generator: torch.Generator) -> None:
    if name.endswith("norm.weight"):
        tensor.fill_(1.0 - config.norm_offset)
    elif name.endswith("bias"):
        tensor.zero_()
    else:
        std = STD / (2 * config.num_layers) ** 0.5 if name.endswith(ADDED) else STD
        tensor.normal_(0.0, std, generator=generator)
