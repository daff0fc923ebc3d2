"""A module in a form: a copy of it, changed as the form says, behind a call that is the original's.

Inputs are converted to what the form computes in, outputs back to the dtypes that they had; what is
switched for a call (tf32, autocast, inference mode) is put back after it. The original is only
read.

    built = build(module, Form(grad=False, dtype="bf16"), example)
    built(*example.args, **example.keywords)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ridgeline.formats.dtypes import parse_dtype
from ridgeline.ladder.modules.forms.attention import switch
from ridgeline.ladder.modules.forms.copies import copied, weight_bytes
from ridgeline.ladder.modules.forms.graphed import Graphed
from ridgeline.ladder.modules.forms.inputs import PinnedInputs, host_tensors, plainly
from ridgeline.ladder.modules.forms.linears import CodedLinear, quantize
from ridgeline.ladder.modules.forms.padding import pad_layers
from ridgeline.ladder.modules.forms.streams import StreamedModule
from ridgeline.ladder.modules.forms.winograd import to_winograd
from ridgeline.profiling.modules.devices import converted
from ridgeline.profiling.modules.form import ModuleForm
from ridgeline.quantization.scheme import parse_scheme


class Example(NamedTuple):
    """What the module is called with."""

    args: tuple[Any, ...]
    keywords: Mapping[str, Any]


class Built:
    """A module in a form; called like the module."""

    def __init__(
        self, module: nn.Module, form: ModuleForm, example: Example, back: torch.dtype | None
    ):
        self.module, self.form = module, form
        self._inner = _executed(module, form, example)
        device = next((p.device for p in module.parameters()), torch.device("cpu"))
        self._device_type = device.type
        self._bring = _bringing(form, example, device)
        self._into = parse_dtype(form.dtype) if form.dtype is not None else None
        self._back = back
        self.call = self._composed()
        if form.graphs:
            self.call = Graphed(self.call, *plainly(tuple(example), device))

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        if self._bring is not None:
            args, keywords = self._bring((args, keywords))
        return self.call(*args, **keywords)

    @property
    def weight_bytes(self) -> int:
        return weight_bytes(self.module)

    def _composed(self) -> Callable[..., Any]:
        """The call, with no more around it than the form asks for: small modules feel each step."""
        form, call = self.form, self._inner
        if self._into is not None or form.layout is not None or form.autocast is not None:
            call = self._converting
        for context in self._contexts():
            call = _within(context, call)
        return call

    def _converting(self, *args: Any, **keywords: Any) -> Any:
        if self._into is not None or self.form.layout is not None:
            args, keywords = converted((args, keywords), self._enter)
        out = self._inner(*args, **keywords)
        if self._into is not None or self.form.autocast is not None:
            out = converted(out, self._leave)
        return out

    def _contexts(self) -> Iterator[Callable[[], AbstractContextManager[Any]]]:
        """What is switched for a call, the innermost first."""
        if self.form.autocast is not None:
            # It keeps its copies of weights for a call, on the stream that needed them first.
            yield partial(
                torch.autocast,
                self._device_type,
                parse_dtype(self.form.autocast),
                cache_enabled=not self.form.streams,
            )
        if self.form.cudnn_benchmark:
            yield cudnn_benchmark
        if self.form.tf32:
            yield tf32
        if not self.form.grad:
            yield torch.inference_mode

    def _enter(self, tensor: Tensor) -> Tensor:
        if self._into is not None and tensor.is_floating_point():
            tensor = tensor.to(self._into)
        if self.form.layout == "channels_last" and tensor.dim() == 4:
            tensor = tensor.contiguous(memory_format=torch.channels_last)
        return tensor

    def _leave(self, tensor: Tensor) -> Tensor:
        is_half = tensor.dtype in (torch.bfloat16, torch.float16)
        return tensor.to(self._back) if is_half and self._back is not None else tensor


def _within(
    context: Callable[[], AbstractContextManager[Any]], call: Callable[..., Any]
) -> Callable[..., Any]:
    def run(*args: Any, **keywords: Any) -> Any:
        with context():
            return call(*args, **keywords)

    return run


def build(
    module: nn.Module, form: ModuleForm, example: Example, back: torch.dtype | None = None
) -> Built:
    """`back` is the dtype of the original's outputs, where all fractions in them have one."""
    dtype = parse_dtype(form.dtype) if form.dtype is not None else None
    made = copied(module, dtype)
    if form.attention == "sdpa":
        switch(made)
    if form.scheme is not None:
        quantize(made, parse_scheme(form.scheme))
        if form.compile is not None:
            _keep_untraced(made)
    if form.pad:
        made = pad_layers(made)
    if form.winograd:
        made = to_winograd(made)
    if form.layout == "channels_last":
        _to_channels_last(made)
    return Built(made, form, example, back)


def _executed(module: nn.Module, form: ModuleForm, example: Example) -> nn.Module | Any:
    if form.streams:
        return StreamedModule(module, example.args, dict(example.keywords))
    return module if form.compile is None else torch.compile(module, mode=form.compile)


def _bringing(
    form: ModuleForm, example: Example, device: torch.device
) -> Callable[[Any], Any] | None:
    """How inputs that lie in the host's memory come to the device; None where none do."""
    if not host_tensors(tuple(example), device):
        return None
    if form.inputs == "pinned":
        return PinnedInputs(device)
    return partial(plainly, device=device)


def _keep_untraced(module: nn.Module) -> None:
    """What torch.compile cannot look into runs as it is, **in place**."""
    for part in module.modules():
        if isinstance(part, CodedLinear) and not part.is_traceable:
            part.forward = torch.compiler.disable(part.forward)  # type: ignore[method-assign]


def _to_channels_last(module: nn.Module) -> None:
    """Weights of convolutions, **in place** but in memory of their own: others share them."""
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None and parameter.dim() == 4:
                moved = parameter.detach().contiguous(memory_format=torch.channels_last)
                part._parameters[name] = nn.Parameter(moved, parameter.requires_grad)


@contextmanager
def tf32() -> Iterator[None]:
    """Products and convolutions of fp32 in tf32, until it ends."""
    cudnn: Any = torch.backends.cudnn
    settings: tuple[Any, ...] = (torch.backends.cuda.matmul, cudnn.conv)
    before = [each.fp32_precision for each in settings]
    try:
        for each in settings:
            each.fp32_precision = "tf32"
        yield
    finally:
        for each, precision in zip(settings, before, strict=True):
            each.fp32_precision = precision


@contextmanager
def cudnn_benchmark() -> Iterator[None]:
    """Kernels of convolutions chosen by timing them once for each shape, until it ends."""
    before = torch.backends.cudnn.benchmark
    try:
        torch.backends.cudnn.benchmark = True
        yield
    finally:
        torch.backends.cudnn.benchmark = before
