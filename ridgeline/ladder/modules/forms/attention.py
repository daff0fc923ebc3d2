"""Attention in one kernel, where a module has a switch for it: nn.MultiheadAttention that is asked
for weights nobody may need, and models of transformers that compute it step by step.

    switchable(module)          # what can be switched, in words; None where nothing can
    switch(copy)                # in place
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import nn


def switchable(module: nn.Module) -> str | None:
    result = []
    if _is_eager(module):
        result.append("attn_implementation is 'eager'")
    count = sum(isinstance(part, nn.MultiheadAttention) for part in module.modules())
    if count:
        result.append(f"{count} nn.MultiheadAttention may be asked for their weights")
    return "; ".join(result) or None


def switch(module: nn.Module) -> None:
    """The copy that is given, **in place**. Where the weights were used, the outputs tell."""
    if _is_eager(module):
        module.set_attn_implementation("sdpa")  # type: ignore[operator]
    for part in module.modules():
        if isinstance(part, nn.MultiheadAttention):
            part.forward = _without_weights(part.forward)  # type: ignore[method-assign]


def _is_eager(module: nn.Module) -> bool:
    config = getattr(module, "config", None)
    known = getattr(config, "_attn_implementation", None) == "eager"
    return known and callable(getattr(module, "set_attn_implementation", None))


def _without_weights(forward: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(forward)
    def call(query: Any, key: Any, value: Any, *args: Any, **keywords: Any) -> Any:
        if len(args) > 1:  # key_padding_mask, need_weights, …
            args = (args[0], False, *args[2:])
        else:
            keywords["need_weights"] = False
        return forward(query, key, value, *args, **keywords)

    return call
