"""The perplexity that another library's model gives the same windows of token ids, each computed
from its first token without a cache: the check for ours.

Log-probabilities are computed in fp32 from the model's logits, as in perplexity.py. Letters: R
rows, V vocabulary, T tokens.

    peer = transformers_peer(path, "fp32", "cpu")                      # bench/peers.py
    theirs = peer_perplexity(peer, windows)
    increase(theirs, perplexity(engine, windows))
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ridgeline.progress import Progress
from ridgeline.quality.perplexity import Perplexity, chosen_logprobs, from_logprobs
from ridgeline.quality.windows import Windows

ROWS_AT_ONCE = 256  # whose logits are turned to fp32 together


def peer_perplexity(model: Any, windows: Windows, progress: Progress | None = None) -> Perplexity:
    """`model` takes token ids [1, T] and returns an object with `logits` [1, T, V], as
    transformers' models do.
    """
    logprobs = []
    for done, window in enumerate(windows.tokens):
        if progress is not None:
            progress("the peer's windows", done, len(windows.tokens))
        logprobs.append(_logprobs(model, window))
    return from_logprobs(logprobs, windows)


@torch.inference_mode()
def _logprobs(model: Any, window: tuple[int, ...]) -> Tensor:
    """Of all tokens but the first, [T - 1], on the host."""
    tokens_T = torch.tensor(window, device=model.device)
    logits_TV = model(tokens_T.unsqueeze(0), use_cache=False).logits[0, :-1]
    pairs = zip(logits_TV.split(ROWS_AT_ONCE), tokens_T[1:].split(ROWS_AT_ONCE), strict=True)
    parts = [chosen_logprobs(1, logits_RV.float(), tokens_R) for logits_RV, tokens_R in pairs]
    return torch.cat(parts)[:, 0].cpu()
