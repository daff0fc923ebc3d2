"""Weights to begin with where there is no checkpoint: small normal numbers, neutral norms.

What is added to the residual stream is drawn smaller the deeper the model is, so that the stream
keeps its size.

    fill_initial(model, seed=0)
"""

from __future__ import annotations

import torch

from ridgeline.models import Transformer

STD = 0.02
ADDED = ("attn.out.weight", "mlp.down.weight", "mlp.down")  # whose result is added to the stream


@torch.no_grad()
def fill_initial(model: Transformer, seed: int) -> Transformer:
    generator = torch.Generator(device=model.embed.weight.device).manual_seed(seed)
    added_std = STD / (2 * model.config.num_layers) ** 0.5
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            parameter.fill_(1.0 - model.config.norm_offset)
        elif name.endswith("bias"):
            parameter.zero_()
        else:
            std = added_std if name.endswith(ADDED) else STD
            parameter.normal_(0.0, std, generator=generator)
    return model
