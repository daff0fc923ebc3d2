"""Fuse: from the plain loop to the engine, whose kernels do several ops at once, whose keys and
values lie in pages, and which samples on the device.
"""

from __future__ import annotations

from typing import Any

from ridgeline.ladder.rungs.base import Offer, Rung, RungContext


def fused(context: RungContext) -> Offer | str:
    """On a GPU the engine has no other kernels; on a CPU they need a compiler."""
    runs_engine = context.state.loop == "engine"
    if runs_engine and (not context.facts.on_cpu or context.filled.kernels == "fused"):
        return "its kernels are fused already"
    if context.facts.on_cpu and any(layer.experts for layer in context.facts.config.layers):
        return "CPU kernels for experts are not written"
    why = "norms, products, rotary and attention each write what the next reads; fused they do not"
    return Offer({"kernels": "fused"} if runs_engine else _engine(context, "fused"), why)


def fused_half(context: RungContext) -> Offer | str:
    if context.state.loop == "engine":
        return "the engine runs it already"
    if context.facts.on_cpu:
        return "on a CPU the plain kernels are tried instead"
    why = "the engine did not do in fp32, which GPUs are slow at; in bf16 it may"
    return Offer(_engine(context, "fused") | {"dtype": "bf16"}, why)


def plain_engine(context: RungContext) -> Offer | str:
    if context.state.loop == "engine":
        return "the engine runs it already"
    if not context.facts.on_cpu:
        return "on a GPU the engine has fused kernels alone"
    return Offer(_engine(context, "reference"), "fused kernels cannot be had here; pages can")


def _engine(context: RungContext, kernels: str) -> dict[str, Any]:
    edit: dict[str, Any] = {"loop": "engine", "kernels": kernels}
    if (
        context.facts.concurrency > 1
    ):  # one at a time as before: that they share steps is a rung of its own
        edit |= {"limits.max_batch": 1}
    if context.facts.prefix_share > 0:  # so is that they share beginnings
        edit |= {"kv.prefix_cache": False}
    return edit


FUSED = Rung("fused", "fuse", "the engine with fused kernels", fused, is_essential=True)
RUNGS = (
    FUSED,
    Rung("fused-bf16", "fuse", "the engine with fused kernels, in bf16", fused_half, True, True),
    Rung("engine", "fuse", "the engine with plain kernels", plain_engine, is_essential=True),
)
