"""Whether a change applies to a module here, and why not: one function for each, that says so in a
line. What the changes are is in profiling/modules/changes.py.

    applies(CHANGES["graphs"], Candidate(module, form, work, example, outcomes))
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from ridgeline.errors import UnsupportedError
from ridgeline.formats.dtypes import dtype_name
from ridgeline.hardware.units import human_bytes
from ridgeline.ladder.modules.bench import TooSlowError, error_in_words
from ridgeline.ladder.modules.deadline import OutOfTimeError
from ridgeline.ladder.modules.forms.attention import switchable
from ridgeline.ladder.modules.forms.branches import critical_share, stream_plan, traced
from ridgeline.ladder.modules.forms.building import Example
from ridgeline.ladder.modules.forms.copies import copied
from ridgeline.ladder.modules.forms.linears import largest_group, replaceable
from ridgeline.ladder.modules.forms.padding import paddable
from ridgeline.ladder.modules.forms.winograd import replaceable_convolutions
from ridgeline.ladder.outcome import RungOutcome, RungStatus
from ridgeline.profiling.modules.alignment import ALIGNED, advice, odd_layers
from ridgeline.profiling.modules.call_work import CallWork
from ridgeline.profiling.modules.changes import ModuleChange
from ridgeline.profiling.modules.form import ModuleForm
from ridgeline.profiling.modules.gains import has_plain_attention
from ridgeline.quantization.devices import check_runs
from ridgeline.quantization.scheme import parse_scheme

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d)


@dataclass(frozen=True)
class Candidate:
    """What a rung looks at."""

    module: nn.Module  # the original
    form: ModuleForm  # what was kept so far
    work: CallWork  # of the original
    example: Example  # what it is called with
    outcomes: Mapping[str, RungOutcome]  # of rungs before, by name
    known: dict[str, RungAnswer] = field(default_factory=dict)  # what holds for every form

    @property
    def on_gpu(self) -> bool:
        return self.work.on_gpu

    @property
    def dtypes(self) -> set[torch.dtype]:
        return {p.dtype for p in self.module.parameters() if p.is_floating_point()}


@dataclass(frozen=True)
class RungAnswer:
    applies: bool
    reason: str
    change: ModuleChange | None = None  # where it is another than the usual: the group of int4


def applies(change: ModuleChange, candidate: Candidate) -> RungAnswer:
    return _RULES[change.name](change, candidate)


def outcome_of(change: ModuleChange, status: RungStatus, reason: str, **more: Any) -> RungOutcome:
    return RungOutcome(
        change.name, change.area, change.title, dict(change.edit), status, reason, **more
    )


def impossible(change: ModuleChange, error: BaseException, **more: Any) -> RungOutcome:
    """Of what raised: it failed, unless it was stopped for taking too long."""
    if isinstance(error, OutOfTimeError):
        return outcome_of(change, "not reached", str(error), **more)
    if isinstance(error, TooSlowError):
        return outcome_of(change, "dropped", str(error), **more)
    return outcome_of(change, "failed", error_in_words(error), **more)


def no(reason: str) -> RungAnswer:
    return RungAnswer(False, reason)


def yes(reason: str) -> RungAnswer:
    return RungAnswer(True, reason)


def _inference(change: ModuleChange, candidate: Candidate) -> RungAnswer:
    if candidate.work.grad:
        return yes("autograd watches the calls: weights require gradients")
    return no("gradients are off already")


def _sdpa(change: ModuleChange, candidate: Candidate) -> RungAnswer:
    result = switchable(candidate.module)
    if result is not None:
        return yes(result)
    if has_plain_attention(candidate.work):
        return no("attention is computed product by product, in code that has no switch for it")
    return no("no attention that a switch would change")


def _channels_last(change: ModuleChange, candidate: Candidate) -> RungAnswer:
    convolutions = [part for part in candidate.module.modules() if isinstance(part, nn.Conv2d)]
    if not convolutions:
        return no("no two-dimensional convolution")
    if all(_is_last(part.weight) for part in convolutions):
        return no("weights have their channels last already")
    return yes(f"{len(convolutions)} convolutions")


def _is_last(weight: torch.Tensor) -> bool:
    last = weight.is_contiguous(memory_format=torch.channels_last)
    return last and not weight.is_contiguous()


def _compile(change: ModuleChange, candidate: Candidate) -> RungAnswer:
    fusible = sum(each.op.kind in ("pointwise", "reduction") for each in candidate.work.ops)
    reason = f"{fusible} pointwise ops and reductions stand alone"
    if candidate.form.streams:
        return RungAnswer(True, reason, replace(change, edit={**change.edit, "streams": False}))
    return yes(reason)


def _tf32(change: ModuleChange, candidate: Candidate) -> RungAnswer:
    if not candidate.on_gpu:
        return no("tf32 needs a GPU")
    if candidate.form.dtype or candidate.form.autocast or torch.float32 not in candidate.dtypes:
        return no("products are not in fp32")
    if torch.backends.cuda.matmul.fp32_precision == "tf32":
        return no("tf32 is on already")
    return yes(f"products are in fp32{unaligned(candidate.module)}")


def _half(change: ModuleChange, candidate: Candidate) -> RungAnswer:
    name = change.edit["dtype"]
    if torch.float32 not in candidate.dtypes:
        held = ", ".join(sorted(map(dtype_name, candidate.dtypes))) or "no fractions"
        return no(f"weights are in {held}")
    if name == "fp16" and not candidate.on_gpu:
        return no("a CPU multiplies fp16 no faster than bf16")
    if candidate.form.dtype not in (None, name):
        return no(f"{candidate.form.dtype} was kept")
    return yes(f"weights are in fp32{unaligned(candidate.module)}")


def _autocast(change: ModuleChange, candidate: Candidate) -> RungAnswer:
    name = change.edit["autocast"]
    if candidate.form.dtype is not None or candidate.form.autocast is not None:
        return no(f"{candidate.form.dtype or candidate.form.autocast} was kept")
    if torch.float32 not in candidate.dtypes:
        return no("weights are not in fp32")
    if name == "fp16" and not candidate.on_gpu:
        return no("a CPU multiplies fp16 no faster than bf16")
    plain = candidate.outcomes.get(name)
    if plain is None or plain.status != "dropped":
        return yes("weights stay in fp32, products are cast")
    if plain.difference is None or plain.difference.problem is None:
        return no(f"weights in {name} gave no speed, and casting them each time gives less")
    return yes(f"weights in {name} are outside the bound; here only products are")


def _graphs(change: ModuleChange, candidate: Candidate) -> RungAnswer:
    if not candidate.on_gpu:
        return no("graphs need a GPU: a CPU has no launches to save")
    return yes(f"{candidate.work.num_kernels} launches a call")


def _weights(change: ModuleChange, candidate: Candidate) -> RungAnswer:
    name = change.edit["scheme"]
    if change.name == "int4":
        group = largest_group(candidate.module)
        if group is None:
            return no("no linear layer has rows of a multiple of 32")
        name = f"int4-g{group}"
        change = replace(change, edit={"scheme": name})
    scheme = parse_scheme(name)
    count = len(replaceable(candidate.module, scheme))
    if count == 0:
        return no("no linear layer whose weights would be replaced")
    kept = candidate.form.dtype or dtype_name(next(iter(candidate.dtypes), torch.float32))
    try:
        check_runs(scheme, kept, candidate.work.hardware.device)
    except UnsupportedError as error:
        return no(str(error).replace("--dtype ", ""))
    return RungAnswer(True, f"weights of {count} linear layers", change)


def _autotune(change: ModuleChange, candidate: Candidate) -> RungAnswer:
    if candidate.form.compile is not None:
        return yes("torch.compile was kept")
    if candidate.on_gpu:  # where it takes minutes
        return no("torch.compile was not kept")
    plain = candidate.outcomes.get("compile")
    if plain is not None and plain.status == "failed":
        return no("torch.compile failed")
    return yes("other kernels than torch.compile's usual ones may be faster")


def _winograd(change: ModuleChange, candidate: Candidate) -> RungAnswer:
    if candidate.on_gpu:
        return no("cuDNN has kernels of its own for it")
    count = len(replaceable_convolutions(candidate.module))
    if count == 0:
        return no("no 3 × 3 convolution with stride 1")
    if candidate.form.dtype or candidate.form.autocast or torch.float32 not in candidate.dtypes:
        return no("half precision would lose too much on the way")
    return yes(f"{count} convolutions of 3 × 3")


def _cudnn_benchmark(change: ModuleChange, candidate: Candidate) -> RungAnswer:
    if not candidate.on_gpu:
        return no("cuDNN runs on a GPU only")
    count = sum(isinstance(part, CONVOLUTIONS) for part in candidate.module.modules())
    if count == 0:
        return no("no convolution")
    if torch.backends.cudnn.benchmark:
        return no("cudnn.benchmark is on already")
    return yes(f"{count} convolutions of the same shapes in every call")


def _pad(change: ModuleChange, candidate: Candidate) -> RungAnswer:
    odd = odd_layers(candidate.module.named_modules())
    if not odd:
        return no(f"{ALIGNED} divides all sizes")
    if not candidate.on_gpu:
        return no(f"a CPU takes any sizes: {advice(odd)}")
    count = len(paddable(candidate.module))
    if count == 0:
        return no(f"none can be padded from outside: {advice(odd)}")
    in_half = candidate.dtypes and torch.float32 not in candidate.dtypes
    if (candidate.form.dtype or candidate.form.autocast) is None and not in_half:
        return no(f"fp32 takes any sizes; in half precision pad them: {advice(odd)}")
    return yes(f"{count} layers: {advice(odd)}")


def _pinned_inputs(change: ModuleChange, candidate: Candidate) -> RungAnswer:
    num_bytes = candidate.work.host_input_bytes
    if num_bytes == 0:
        return no("inputs are on the module's device already")
    return yes(f"{human_bytes(num_bytes)} of inputs come from the host in every call")


def _streams(change: ModuleChange, candidate: Candidate) -> RungAnswer:
    if not candidate.on_gpu:
        return no("streams need a GPU")
    if candidate.form.compile is not None:
        return no("torch.compile puts all kernels on one stream")
    if "streams" not in candidate.known:  # tracing takes a while
        candidate.known["streams"] = _branches(candidate)
    return candidate.known["streams"]


def with_branches(work: CallWork, module: nn.Module, example: Example) -> CallWork:
    """With what branches beside each other would leave of a call on a GPU."""
    if not work.on_gpu:
        return work
    try:
        graph = traced(copied(module), *example).graph
    except (UnsupportedError, TypeError):
        return work
    seconds: dict[str, float] = {}
    for each in work.ops:
        seconds[each.op.path] = seconds.get(each.op.path, 0.0) + each.seconds
    return replace(work, critical_share=critical_share(graph, seconds, sum(seconds.values())))


def _branches(candidate: Candidate) -> RungAnswer:
    try:
        plan = stream_plan(traced(copied(candidate.module), *candidate.example).graph)
    except (UnsupportedError, TypeError) as error:
        return no(f"branches cannot be shown to be independent: {error}")
    if plan.num_branches < 2:
        return no("no branches that are independent")
    return yes(f"{plan.num_branches} branches are independent")


def unaligned(module: nn.Module) -> str:
    """For a line: which sizes keep products from a GPU's matrix units."""
    odd = odd_layers(module.named_modules())
    if not odd:
        return f"; all sizes are multiples of {ALIGNED}"
    return f"; sizes that {ALIGNED} does not divide: {advice(odd)}"


_RULES: dict[str, Callable[[ModuleChange, Candidate], RungAnswer]] = {
    "inference": _inference,
    "sdpa": _sdpa,
    "channels-last": _channels_last,
    "compile": _compile,
    "tf32": _tf32,
    "bf16": _half,
    "fp16": _half,
    "autocast-bf16": _autocast,
    "autocast-fp16": _autocast,
    "graphs": _graphs,
    "int8": _weights,
    "int4": _weights,
    "autotune": _autotune,
    "winograd": _winograd,
    "cudnn-benchmark": _cudnn_benchmark,
    "pad": _pad,
    "pinned-inputs": _pinned_inputs,
    "streams": _streams,
}
