"""The changes that can be made to how a module runs, in the order of the ladder: `profile` says
what each would give, `optimize` makes and measures them.

    CHANGES["bf16"].edit       # {"dtype": "bf16"}
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ridgeline.profiling.modules.form import ModuleForm
from ridgeline.profiling.predicting.prediction import Area, Prediction


@dataclass(frozen=True)
class ModuleChange:
    name: str
    area: Area
    title: str
    how: str  # by hand
    edit: Mapping[str, Any]  # of a Form
    is_guess: bool = False  # the gain hangs on what no count tells: intervals are wider
    alters: bool = False  # outputs by more than rounding: kept only inside the bound
    is_free: bool = False  # nothing is slower with it: part of every first answer

    def of(self, form: ModuleForm) -> ModuleForm:
        return replace(form, **self.edit)


@dataclass(frozen=True)
class Suggestion:
    """A change worth a try."""

    title: str
    how: str  # a line of code that makes the change
    prediction: Prediction


_ALL = (
    ModuleChange(
        "inference", "overhead", "inference mode, without autograd",
        "wrap calls in torch.inference_mode()", {"grad": False}, is_free=True,
    ),
    ModuleChange(
        "sdpa", "fuse", "fused attention (SDPA)",
        "use F.scaled_dot_product_attention; need_weights=False; attn_implementation='sdpa'",
        {"attention": "sdpa"},
    ),
    ModuleChange(
        "channels-last", "fuse", "channels-last memory format",
        "module.to(memory_format=torch.channels_last), and the inputs too",
        {"layout": "channels_last"}, is_guess=True,
    ),
    ModuleChange(
        "cudnn-benchmark", "custom kernels", "convolutions timed for these shapes",
        "torch.backends.cudnn.benchmark = True", {"cudnn_benchmark": True}, is_guess=True,
    ),
    ModuleChange(
        "winograd", "custom kernels", "3×3 convolutions by Winograd's products",
        "ridgeline.optimize(module, inputs)", {"winograd": True}, is_guess=True,
    ),
    ModuleChange(
        "compile", "fuse", "torch.compile",
        "torch.compile(module)", {"compile": "default"}, is_guess=True,
    ),
    ModuleChange(
        "tf32", "tensor cores", "fp32 matmuls in TF32",
        "torch.backends.cuda.matmul.fp32_precision = 'tf32'", {"tf32": True}, alters=True,
    ),
    ModuleChange(
        "bf16", "tensor cores", "weights and matmuls in bf16",
        "module.to(torch.bfloat16), and the inputs too", {"dtype": "bf16", "autocast": None},
        alters=True,
    ),
    ModuleChange(
        "fp16", "tensor cores", "weights and matmuls in fp16",
        "module.to(torch.float16), and the inputs too", {"dtype": "fp16", "autocast": None},
        alters=True,
    ),
    ModuleChange(
        "autocast-bf16", "tensor cores", "autocast to bf16, weights unchanged",
        "torch.autocast(device, torch.bfloat16)", {"autocast": "bf16"}, alters=True,
    ),
    ModuleChange(
        "autocast-fp16", "tensor cores", "autocast to fp16, weights unchanged",
        "torch.autocast(device, torch.float16)", {"autocast": "fp16"}, alters=True,
    ),
    ModuleChange(
        "pad", "tensor cores", "layers padded to multiples of 8",
        "pad weights with zeros to sizes that 8 divides, and cut the outputs", {"pad": True},
        is_guess=True,
    ),
    ModuleChange(
        "pinned-inputs", "overhead", "pinned, asynchronous copies of inputs",
        "x.pin_memory().to(device, non_blocking=True)", {"inputs": "pinned"}, is_guess=True,
    ),
    ModuleChange(
        "streams", "overhead", "independent branches on several streams",
        "torch.cuda.Stream for each branch, joined by events", {"streams": True}, is_guess=True,
    ),
    ModuleChange(
        "graphs", "overhead", "replay of a captured graph",
        "ridgeline.capture, or torch.compile(module, mode='reduce-overhead')", {"graphs": True},
    ),
    ModuleChange(
        "int8", "quantize", "int8 weights in linear layers",
        "ridgeline.optimize(module, inputs)", {"scheme": "int8"}, alters=True,
    ),
    ModuleChange(
        "int4", "quantize", "int4 weights in linear layers",
        "ridgeline.optimize(module, inputs)", {"scheme": "int4-g128"}, alters=True,
    ),
    ModuleChange(
        "autotune", "custom kernels", "torch.compile, autotuned for this machine",
        "torch.compile(module, mode='max-autotune-no-cudagraphs')",
        {"compile": "max-autotune-no-cudagraphs"}, is_guess=True,
    ),
)  # fmt: skip
CHANGES = {change.name: change for change in _ALL}
