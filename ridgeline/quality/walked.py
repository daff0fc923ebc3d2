"""The logits of a model that does not fit on the device: its blocks are copied from the host one
after the other, and all text goes through each.

The last hidden state of each token is kept in host memory; logits are computed from these when they
are needed. Attention is over whole prompts, without pages: this is for the model that others are
compared with, not for the one that will run.

    original = Original(Walked(model, windows.tokens, "cuda:0"), windows, KEPT_BYTES)

Letters: R rows, V vocabulary, D hidden size, T tokens of a window.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ridgeline.engine.sampling.scoring import RowScore
from ridgeline.models import Transformer
from ridgeline.models.copies import on_device, with_kinds
from ridgeline.progress import Progress
from ridgeline.quantization.blocks import BlockWalk

ROWS_AT_ONCE = 256  # whose logits are made together
TokenWindow = tuple[int, ...]


class Walked:
    """Scores windows as an `Engine` does: those that it was made with."""

    def __init__(
        self,
        model: Transformer,
        windows: Sequence[TokenWindow],
        device: str | torch.device,
        progress: Progress | None = None,
    ) -> None:
        self.config, self.device = model.config, torch.device(device)
        self.model = with_kinds(model, lambda kind: kind)  # the end of it on the device
        self.model.norm = on_device(model.norm, device)
        self.model.head = on_device(model.head, device)
        distinct = list(dict.fromkeys(windows))
        states = _last_states(model, distinct, self.device, progress)
        self._states_TD = dict(zip(distinct, states, strict=True))

    @torch.inference_mode()
    def score(self, prompts: Sequence[TokenWindow], scores: Sequence[RowScore]) -> list[Tensor]:
        """A row for each token but the first, on the host: see engine/sampling/scoring.py."""
        return [self._scored(*each) for each in zip(prompts, scores, strict=True)]

    def _scored(self, window: TokenWindow, score: RowScore) -> Tensor:
        tokens_T = torch.tensor(window, device=self.device)
        parts = []
        for start in range(0, len(window) - 1, ROWS_AT_ONCE):
            end = min(start + ROWS_AT_ONCE, len(window) - 1)
            x_RD = self._states_TD[window][start:end].to(self.device)
            logits_RV = self.model.logits(self.model.norm(x_RD))
            parts.append(score(start + 1, logits_RV, tokens_T[start + 1 : end + 1]).cpu())
        return torch.cat(parts)


def _last_states(
    model: Transformer, windows: list[TokenWindow], device: torch.device, progress: Progress | None
) -> list[Tensor]:
    """The last block's output for each window [T, D], on the host."""
    walk = BlockWalk(model, [torch.tensor(window) for window in windows], device, keep_on_host=True)
    for index in range(model.config.num_layers):
        if progress is not None:
            progress("the original, block by block", index, model.config.num_layers)
        walk.advance(walk.copy_block(index))
    return walk.inputs
