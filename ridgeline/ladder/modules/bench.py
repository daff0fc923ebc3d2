"""Forms of a module built, their outputs compared with the original's, and timed in rounds that
take turns; and how much of the time given is left for the next.

    bench = ModuleBench(module, original, reference, example, work, settings)
    checked = bench.checked(form)
    if checked.difference.problem is None: bench.compared(bench.original, checked.built)
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from ridgeline.errors import RidgelineError
from ridgeline.hardware.units import human
from ridgeline.ladder.measuring.rounds import interleaved
from ridgeline.ladder.modules.deadline import OutOfTimeError, time_limit
from ridgeline.ladder.modules.forms.building import Built, Example, build
from ridgeline.ladder.modules.outputs import difference
from ridgeline.ladder.modules.settings import Settings
from ridgeline.ladder.outcome import Difference, Speedup
from ridgeline.profiling.modules.call_work import CallWork
from ridgeline.profiling.modules.devices import tensors
from ridgeline.profiling.modules.form import ModuleForm
from ridgeline.profiling.modules.tracing import first_line
from ridgeline.timing import time_device, time_host

WORTH = 1.01  # times as fast: less is not worth a change, however sure
RECOMPILES = 64  # forms of one module are, to torch.compile, one function that changes
STARTING_S = 12.0  # torch.compile's first time in a process (2026-11-18: 10 to 15 s, caches empty)
COMPILE_S = 5.0  # torch.compile takes at least
COMPILE_OP_S = 0.03  # and for each op (Xeon, one thread, 2026-11-15: 12 s for BERT-base)
# Times as long: a GPU times tiles of every product, a CPU a few ways to cut the large ones.
AUTOTUNE = {"cuda": 5.0, "cpu": 2.0}
SAMPLES = 3  # of a side in a round, at least
WARMING = 2  # calls before them
SLOW_CALL_S = 0.05  # of a CPU: one call is a sample
HOPELESS = 2.0  # times as long as without: no interval is needed to leave it out
# A CPU without bf16 takes 20 s for a call of 70 ms in it: the first is not waited for.
FIRST_CALL, FIRST_CALL_S = 5.0, 2.0  # times as long as the original, or seconds
# Whatever torch, a compiler or the module itself raises: then a form is not possible.
IMPOSSIBLE = (RidgelineError, RuntimeError, TypeError, ValueError, AttributeError, LookupError,
              AssertionError)  # fmt: skip


class TooSlowError(RidgelineError):
    """A form whose first call takes many times as long as the original."""


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
        self._has_compiled = False

    @property
    def spent_s(self) -> float:
        return time.monotonic() - self._began

    def checked(self, form: ModuleForm, share: float = 1.0) -> CheckedForm:
        """Raises one of IMPOSSIBLE where there is no such form: OutOfTimeError where compiling
        takes more than `share` of the time left, TooSlowError where a call takes far too long.
        """
        usual_s, began_s = self.compiling_s(form), self.spent_s
        label = "a first call" if form.compile is None else "compiling"
        try:
            with time_limit(self._limit_s(form, share), label):
                built = build(self.module, form, self.example, output_dtype(self.reference))
                out = built(*self.example.args, **self.example.keywords)
        except OutOfTimeError as error:
            if form.compile is not None:
                self._learn(usual_s, self.spent_s - began_s)
                raise
            usual = human(self.work.call_s, "s")
            raise TooSlowError(f"{error}; as given it takes {usual}") from error
        self._learn(usual_s, self.spent_s - began_s)
        return CheckedForm(built, difference(self.reference, out, self.settings.bounds))

    def _learn(self, usual_s: float, took_s: float) -> None:
        """Of compiling, for what is compiled next."""
        if usual_s > 0:
            self._compiling *= took_s / usual_s
            self._has_compiled = True

    def _limit_s(self, form: ModuleForm, share: float) -> float | None:
        """To build it and call it once: two comparisons are to fit behind what is compiled. Kernels
        of codes and of a GPU may be built in a first call, which takes what it takes.
        """
        budget_s = self.settings.budget_s
        if form.compile is not None:
            if budget_s is None:
                return None
            return share * max(budget_s - self.spent_s - 2 * self.rounds_s(), 0.0)
        if self.device.type != "cpu" or form.scheme is not None:
            return None
        return max(FIRST_CALL * self.work.call_s, FIRST_CALL_S)

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

        if self._is_slow:
            num_calls = math.ceil(round_s / self.work.call_s)
            return 1.0 / statistics.median(self._calls_s(side, num_calls))
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
        if self.device.type != "cpu":
            return time_device(
                lambda: side(*args, **keywords), device=self.device,
                target_s=0.0, min_samples=SAMPLES, warmup_s=0.0,
            ).min_s  # fmt: skip
        return min(self._calls_s(side, SAMPLES))

    @property
    def _is_slow(self) -> bool:
        """A call is long enough to be timed by itself, with nothing run before it to warm up."""
        return self.device.type == "cpu" and self.work.call_s >= SLOW_CALL_S

    def _calls_s(self, side: Built, num_calls: int) -> list[float]:
        """Of single calls, on a CPU."""
        args, keywords = self.example
        seconds = []
        for _ in range(num_calls):
            began = time.perf_counter()
            side(*args, **keywords)
            seconds.append(time.perf_counter() - began)
        return seconds

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
        num_calls = 1 if self._is_slow else SAMPLES + WARMING
        return 2 * (self.settings.rounds + 1) * max(length_s, num_calls * self.work.call_s)

    def compiling_s(self, form: ModuleForm) -> float:
        """By what compiling took so far in this climb, and guessed before."""
        if form.compile is None:
            return 0.0
        seconds = COMPILE_S + COMPILE_OP_S * len(self.work.ops)
        if form.compile != "default":
            seconds *= AUTOTUNE["cpu" if self.device.type == "cpu" else "cuda"]
        return self._compiling * seconds if self._has_compiled else STARTING_S + seconds

    def release(self) -> None:
        """What a dropped form held on a GPU; looking for cycles takes a third of a second."""
        if self.device.type != "cpu":
            gc.collect()
            torch.cuda.empty_cache()


def far_slower(call_s: float, before_s: float) -> str | None:
    """In words, where no rounds are needed to see it."""
    if call_s < HOPELESS * before_s:
        return None
    return f"far slower in a first call: {human(call_s, 's')} instead of {human(before_s, 's')}"


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
