"""The definition of routing and of the expert pass: one expert after the other.

Letters: T tokens, D hidden size, E experts, A experts a token goes through, F expert MLP size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.kernels.gated_activation import Activation, gated_activation
from ridgeline.products import linear


def route(logits_TE: Tensor, experts_per_token: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    """Weights and expert ids [T, A]: the best of the softmax in fp32, the first of equals first,
    rescaled to sum to one if asked.
    """
    weights_TE, experts_TE = torch.softmax(logits_TE.float(), dim=-1).sort(
        dim=-1, descending=True, stable=True
    )
    weights_TA = weights_TE[:, :experts_per_token]
    experts_TA = experts_TE[:, :experts_per_token]
    if renormalize:
        weights_TA = weights_TA / weights_TA.sum(-1, keepdim=True)
    return weights_TA, experts_TA


def mixture_of_experts(
    x_TD: Tensor,
    weights_TA: Tensor,
    experts_TA: Tensor,
    gate_up_E2FD: Tensor,
    down_EDF: Tensor,
    activation: Activation,
    products: torch.dtype | None = None,
) -> Tensor:
    """The sum, in fp32, over each token's experts of weight · `down(act(gate(x)) · up(x))`.

    What passes from one product to the next is rounded to x's dtype. The products are computed in
    `products`, or in x's dtype: with fp32 this is what the kernels are held to, without it the
    expert pass of a model's own dtype. An expert E, behind the last one, is another device's:
    nothing is added.
    """
    dtype = products or x_TD.dtype
    out_TD = torch.zeros_like(x_TD, dtype=torch.float32)
    for expert in experts_TA.unique().tolist():
        if expert == len(down_EDF):
            continue
        token_ids, slots = torch.where(experts_TA == expert)
        expert_out = one_expert(
            x_TD[token_ids], gate_up_E2FD[expert], down_EDF[expert], activation, dtype
        )
        weighted = expert_out.float() * weights_TA[token_ids, slots].unsqueeze(1)
        out_TD = out_TD.index_add(0, token_ids, weighted)
    return out_TD.to(x_TD.dtype)


def one_expert(
    x_TD: Tensor,
    gate_up_2FD: Tensor,
    down_DF: Tensor,
    activation: Activation,
    products: torch.dtype | None = None,
) -> Tensor:
    """What an expert makes of tokens, of which there may be none."""
    dtype = products or x_TD.dtype
    gate_up = linear(x_TD.to(dtype), gate_up_2FD.to(dtype))
    hidden = gated_activation(gate_up, activation).to(x_TD.dtype)
    return linear(hidden.to(dtype), down_DF.to(dtype)).to(x_TD.dtype)
