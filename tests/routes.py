"""Which experts a model's tokens went through, and the same experts again.

A mixture is not continuous: where a token's last chosen expert and the best one left out are nearly
as good, any rounding may choose the other. So numbers are compared with the experts held fixed, and
choices by how near the ties were. Letters: T tokens, E experts, A experts a token goes through.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple
from unittest import mock

import torch
from torch import Tensor

from ridgeline.models import transformer

# Logits of the tiny models (of size 1.5) in bf16 are off by 0.02 to 0.1, growing by the layer: two
# of them part or meet by twice that at most.
NEAR = 0.2


class Route(NamedTuple):
    """One layer's choice, on the CPU."""

    logits: Tensor  # [T, E]
    experts: Tensor  # [T, A]

    @property
    def margins_T(self) -> Tensor:
        """By how much a token's last expert is better than the best one left out."""
        best_TE = self.logits.sort(-1, descending=True).values
        num_chosen = self.experts.shape[1]
        return best_TE[:, num_chosen - 1] - best_TE[:, num_chosen]


@contextmanager
def watched_routes() -> Iterator[list[Route]]:
    """The choices of all layers that run meanwhile, in their order."""
    found: list[Route] = []
    choose = transformer.route

    def watching(logits_TE: Tensor, count: int, renormalize: bool) -> tuple[Tensor, Tensor]:
        weights_TA, experts_TA = choose(logits_TE, count, renormalize)
        found.append(Route(logits_TE.float().cpu(), experts_TA.long().cpu()))
        return weights_TA, experts_TA

    with mock.patch.object(transformer, "route", watching):
        yield found


@contextmanager
def same_experts(experts: Sequence[Tensor]) -> Iterator[None]:
    """Layers that run meanwhile take these experts [T, A], with weights by their own logits."""
    left = list(experts)
    choose = transformer.route

    def following(logits_TE: Tensor, count: int, renormalize: bool) -> tuple[Tensor, Tensor]:
        weights_TA, own_TA = choose(logits_TE, count, renormalize)
        experts_TA = left.pop(0).to(logits_TE.device)
        probabilities_TE = torch.softmax(logits_TE.float(), -1)
        fixed_TA = probabilities_TE.gather(1, experts_TA)
        if renormalize:
            fixed_TA = fixed_TA / fixed_TA.sum(-1, keepdim=True)
        return fixed_TA.to(weights_TA.dtype), experts_TA.to(own_TA.dtype)

    with mock.patch.object(transformer, "route", following):
        yield
    assert not left, f"{len(left)} layers did not run"


def assert_flips_are_near_ties(expected: Sequence[Route], found: Sequence[Route]) -> None:
    """In each layer, most tokens go through the same experts and the others were near ties. Once a
    token has gone another way, it and those that attend to it are other tokens: they are not asked
    in later layers.
    """
    num_tokens = len(expected[0].logits)
    asked = num_tokens  # tokens before the first that has gone another way
    for layer, (right, own) in enumerate(zip(expected, found, strict=True)):
        flipped_T = (right.experts.sort(-1).values != own.experts.sort(-1).values).any(-1)
        for token in flipped_T[:asked].nonzero().flatten().tolist():
            margin = right.margins_T[token].item()
            assert margin < NEAR, f"layer {layer}, token {token}: experts {margin:.3f} apart"
        assert flipped_T.float().mean() < 0.5, f"layer {layer}: most choices are others"
        asked = min([asked, *flipped_T.nonzero().flatten().tolist()])
