"""Forms of a module built, their outputs compared with the original's, and timed in rounds that
take turns; and how much of the time given is left for the next.

    bench = ModuleBench(module, original, reference, example, work, settings)
    checked = bench.checked(form)
    if checked.difference.problem is None: bench.compared(bench.original, checked.built)
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from ridgeline.errors import RidgelineError
from ridgeline.ladder.measuring.rounds import interleaved
from ridgeline.ladder.modules.forms.building import Built, Example, build
from ridgeline.ladder.modules.outputs import difference
from ridgeline.ladder.modules.settings import Settings
from ridgeline.ladder.outcome import Difference, Speedup
from ridgeline.profiling.modules.call_work import CallWork
from ridgeline.profiling.modules.devices import tensors
from ridgeline.profiling.modules.form import ModuleForm
from ridgeline.profiling.modules.tracing import first_line
from ridgeline.timing import measure, time_device, time_host

WORTH = 1.01  # times as fast: less is not worth a change, however sure
RECOMPILES = 64  # forms of one module are, to torch.compile, one function that changes
COMPILE_S = 5.0  # torch.compile takes at least
COMPILE_OP_S = 0.03  # and for each op (Xeon, one thread, 2026-11-15: 12 s for BERT-base)
AUTOTUNE = 5.0  # times as long
SAMPLES = 3  # of a side in a round, at least
# Whatever torch, a compiler or the module itself raises: then a form is not possible.
IMPOSSIBLE = (RidgelineError, RuntimeError, TypeError, ValueError, AttributeError, LookupError,
              AssertionError)  # fmt: skip


class CheckedForm(NamedTuple):
    built: Built
    difference: Difference  # of its outputs from the original's


class ModuleBench:
    """`original` is a copy of the user's module, which nobody calls."""

    def __init__(
        self,
        module: nn.Module,
        original: Built,
        reference: Any,
        example: Example,
        work: CallWork,
        settings: Settings,
        began: float | None = None,
    ) -> None:
        """`began`: when the budget began, by the monotonic clock; None: now."""
        self.module, self.original, self.reference = module, original, reference
        self.example, self.work, self.settings = example, work, settings
        self.device = torch.device(work.hardware.device)
        self._began = time.monotonic() if began is None else began
        self._compiling = 1.0  # times as long as usual, by the last that was compiled

    @property
    def spent_s(self) -> float:
        return time.monotonic() - self._began

    def checked(self, form: ModuleForm) -> CheckedForm:
        """Raises one of IMPOSSIBLE where there is no such form."""
        usual_s, began = self.compiling_s(form), time.monotonic()
        built = build(self.module, form, self.example, output_dtype(self.reference))
        out = built(*self.example.args, **self.example.keywords)
        if usual_s > 0:
            self._compiling *= (time.monotonic() - began) / usual_s
        return CheckedForm(built, difference(self.reference, out, self.settings.bounds))

    def compared(self, before: Built, after: Built, round_s: float | None = None) -> Speedup:
        length_s = self.settings.round_s if round_s is None else round_s
        for side in (before, after):
            self.rate(side, length_s)  # whatever is compiled or allocated when first used
        return interleaved(
            lambda: self.rate(before, length_s),
            lambda: self.rate(after, length_s),
            self.settings.rounds,
        )

    def rate(self, side: Built, round_s: float) -> float:
        """Calls a second: one at a time, or for throughput queued behind each other."""
        args, keywords = self.example

        def call() -> Any:
            return side(*args, **keywords)

        queued = self.settings.goal == "throughput" and self.device.type != "cpu"
        timed = (time_device if queued else time_host)(
            call, device=self.device, min_samples=SAMPLES, target_s=round_s, warmup_s=0.0
        )
        return 1.0 / timed.median_s

    def glance_s(self, side: Built) -> float:
        """Of a call, from a few: enough to tell what is hopeless. On a GPU of the device alone,
        since the host's part goes with a graph.
        """
        args, keywords = self.example
        return measure(
            lambda: side(*args, **keywords), self.device,
            target_s=0.0, min_samples=SAMPLES, warmup_s=0.0,
        ).min_s  # fmt: skip

    def has_time(
        self, form: ModuleForm, round_s: float | None = None, spare_s: float = 0.0
    ) -> bool:
        """To build it and measure it, with `spare_s` left after it."""
        budget_s = self.settings.budget_s
        if budget_s is None:
            return True
        needed_s = self.rounds_s(round_s) + self.compiling_s(form) + spare_s
        return self.spent_s + needed_s <= budget_s

    def rounds_s(self, round_s: float | None = None) -> float:
        """Of one comparison, about."""
        length_s = self.settings.round_s if round_s is None else round_s
        return 2 * (self.settings.rounds + 1) * max(length_s, SAMPLES * self.work.call_s)

    def compiling_s(self, form: ModuleForm) -> float:
        if form.compile is None:
            return 0.0
        seconds = self._compiling * (COMPILE_S + COMPILE_OP_S * len(self.work.ops))
        return seconds if form.compile == "default" else AUTOTUNE * seconds

    def release(self) -> None:
        """What a dropped form held on a GPU; looking for cycles takes a third of a second."""
        if self.device.type != "cpu":
            gc.collect()
            torch.cuda.empty_cache()


def in_words(speedup: Speedup) -> str:
    return f"{speedup.value:.2f}× ({speedup.low:.2f} to {speedup.high:.2f})"


def error_in_words(error: BaseException) -> str:
    return f"{type(error).__name__}: {first_line(error)}"


def output_dtype(reference: Any) -> torch.dtype | None:
    """Of all fractions in it, where they have one."""
    result = {tensor.dtype for tensor in tensors(reference) if tensor.is_floating_point()}
    return next(iter(result)) if len(result) == 1 else None


@contextmanager
def many_recompiles() -> Iterator[None]:
    """Without it torch.compile would, after eight forms, quietly run the next ones uncompiled."""
    import torch._dynamo.config as settings  # takes a second: only who compiles pays it

    with settings.patch(recompile_limit=max(RECOMPILES, settings.recompile_limit)):
        yield
