"""`ModuleForm`: how a module is executed, as a recipe says it for a model of our families. The
ladder for modules is nothing but edits to it; predictions are made for it.

    form = ModuleForm(grad=False, dtype="bf16", graphs=True)
    replace(form, scheme="int8").edit_from(form)      # {"scheme": "int8"}
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal

HalfDtype = Literal["bf16", "fp16"]


@dataclass(frozen=True)
class ModuleForm:
    """The default is the module as it was given."""

    grad: bool = True  # autograd watches; without: torch.inference_mode
    attention: Literal["sdpa"] | None = None  # None: as it is
    compile: Literal["default", "max-autotune-no-cudagraphs"] | None = None  # torch.compile's mode
    layout: Literal["channels_last"] | None = None
    tf32: bool = False  # products of fp32 in tf32, for the time of a call
    dtype: HalfDtype | None = None  # of weights and inputs; None: as they are
    autocast: HalfDtype | None = None  # of products only, weights stay
    graphs: bool = False  # replayed from a captured graph
    scheme: str | None = None  # of the weights of linear layers
    cudnn_benchmark: bool = False  # convolutions timed once for each shape, for the time of a call
    pad: bool = False  # layers whose sizes 8 does not divide get zeros up to the next multiple
    inputs: Literal["pinned"] | None = None  # from the host by pinned memory, not waited for
    winograd: bool = False  # convolutions of 3 × 3 by Winograd's products
    streams: bool = False  # independent branches on streams of their own

    def edit_from(self, other: ModuleForm) -> dict[str, Any]:
        """What it changes of another."""
        return {
            field.name: getattr(self, field.name)
            for field in fields(self)
            if getattr(self, field.name) != getattr(other, field.name)
        }

    @property
    def computes_in(self) -> str | None:
        """The dtype of products; None: as it is."""
        return self.dtype or self.autocast or ("tf32" if self.tf32 else None)
