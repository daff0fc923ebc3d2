"""What a training step's model was fitted to: shares of the datasheet that software reaches, by the
GPU's generation. Data, in fitted.json: which sources they were fitted to, and on which they were
judged, stand beside them; `ridgeline plan --validate` shows how well.

    fitted = load_fitted()
    fitted.product_share("H100 SXM", "bf16"), fitted.fitted_to
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any

FAMILIES = {"A100": "ampere", "H100": "hopper", "H200": "hopper", "B200": "blackwell",
            "B300": "blackwell", "GB200": "blackwell", "GB300": "blackwell",
            "MI": "cdna"}  # fmt: skip


@dataclass(frozen=True)
class Fitted:
    when: str
    fitted_to: tuple[str, ...]  # sources
    judged_on: tuple[str, ...]
    products: Mapping[str, float]  # of the datasheet's rate, by generation
    fp8: Mapping[str, float]
    fp4: Mapping[str, float]
    product_bytes: float  # of what a product reads and writes, what does not hide behind its math
    bandwidth: float  # of the datasheet's, by element-wise passes
    kernel_s: float  # between two kernels
    attention: Mapping[str, float]  # forward, of what products reach, by kernel
    attention_backward: float  # of the forward pass's share
    hopper_flash: float  # of those shares, by kernels that were written for Ampere
    score_bytes: float  # moved for each pair where scores are written out, both passes
    tax: float  # of a step, for each doubling of nodes
    power_exponent: float  # of the matrix rate, over the power limit
    experts: float  # of products' share, where each token goes through other matrices
    odd: float  # of products' share, where a rank's columns are no multiple of 64
    tensor: float  # of what collectives of `tensor` are modelled to take
    errors: Mapping[str, float]  # relative, that four of five of those judged stay within
    memory_error: float  # the same of peaks of memory
    # What the user's machine reached of the prediction, by part (`ridgeline plan --calibrate`).
    corrections: Mapping[str, float]
    is_measured: bool = False
    own_error: float | None = None  # of the corrected prediction, on the user's machine

    def product_share(self, gpu: str, units: str) -> float:
        table = {"fp8": self.fp8, "fp4": self.fp4}.get(units, self.products)
        return table.get(family_of(gpu), table["other"])

    def knows(self, gpu: str) -> bool:
        """Whether published runs on such GPUs were fitted to, or judged."""
        family = family_of(gpu)
        return family != "other" and family in self.errors

    def error_on(self, gpu: str) -> float:
        """Of a step: steps are expected between it / (1 + error) and it · (1 + error)."""
        if self.own_error is not None:
            return self.own_error
        return self.errors.get(family_of(gpu), self.errors["other"])

    def correction(self, part: str) -> float:
        return self.corrections.get(part, 1.0)

    def corrected(self, corrections: Mapping[str, float], error: float) -> Fitted:
        return replace(self, corrections=dict(corrections), is_measured=True, own_error=error)

    @property
    def least_correction(self) -> float:
        return min((1.0, *self.corrections.values()))


def family_of(gpu: str) -> str:
    return next((family for name, family in FAMILIES.items() if gpu.startswith(name)), "other")


@cache
def load_fitted() -> Fitted:
    text = files("ridgeline.planning.training").joinpath("fitted.json").read_text("utf-8")
    return fitted_from(json.loads(text))


def fitted_from(values: Mapping[str, Any]) -> Fitted:
    kept = dict(values) | {key: tuple(values[key]) for key in ("fitted_to", "judged_on")}
    return Fitted(**kept, corrections={})
