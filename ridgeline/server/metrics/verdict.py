"""The verdict: one sentence on what limits a server now, and what to change next.

    verdict = judge(window_of(samples, served), served)
    print(verdict.sentence)
    # Decode is limited by weight bandwidth, at 83% of this machine's; KV pages full 12% of the
    # time; host gap 3%; next: …

A pure function of a window. Rules in the order of what a change would help first: a host that
cannot keep up, pages that are full, a batch that is full, and then the roofline.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ridgeline.formats.dtypes import dtype_bytes, parse_dtype
from ridgeline.hardware.units import over_words
from ridgeline.profiling.placing import LOW_SHARE
from ridgeline.recipe import flag
from ridgeline.server.metrics.served import Served
from ridgeline.server.metrics.window import PhaseMeans, Window

VerdictKind = Literal["idle", "host", "pages", "queue", "memory", "compute", "overhead", "unknown"]

IDLE_SHARE = 0.02  # of the time with work at hand: less is idle
HOST_SHARE = 0.25  # of the time with work, the device idle: more is the host's fault
FULL_SHARE = 0.10  # of the time with full pages: more is worth a change
BATCH_SHARE = 0.95  # of the largest batch: more is full
QUIET_SHARE = 0.5  # of the time with work at hand: less is mentioned


@dataclass(frozen=True)
class ServerVerdict:
    kind: VerdictKind
    bound: str  # what bounds it
    facts: tuple[str, ...]  # other observations
    next: str  # what to do about it; empty if nothing

    @property
    def sentence(self) -> str:
        parts = [self.bound, *self.facts] + ([f"next: {self.next}"] if self.next else [])
        text = "; ".join(parts)
        return text[0].upper() + text[1:] + "."


def judge(window: Window | None, served: Served) -> ServerVerdict:
    if window is None or window.active_share < IDLE_SHARE:
        return ServerVerdict("idle", "idle: no request is running", (), "")
    kind, bound = _kind(window, served)
    facts = (*_over(window), *_facts(window, kind))
    return ServerVerdict(kind, bound, facts, _next(kind, window, served))


def _over(window: Window) -> list[str]:
    phases = {"decode": window.decode, "prefill": window.prefill}
    shares = {
        name: max(phase.memory_share or 0.0, phase.matrix_share or 0.0)
        for name, phase in phases.items()
        if phase is not None
    }
    return list(filter(None, [over_words(shares)]))


def main_phase(window: Window) -> tuple[str, PhaseMeans]:
    """The kind of steps that took most of the time."""
    phases = {"decode": window.decode, "prefill": window.prefill}
    present = [(name, phase) for name, phase in phases.items() if phase is not None]
    assert present, "an active window has steps"
    return max(present, key=lambda pair: pair[1].busy_s)


def _kind(window: Window, served: Served) -> tuple[VerdictKind, str]:
    if window.busy_s == 0 or window.gap_share >= HOST_SHARE:
        idle = _percent(window.gap_share)
        return (
            "host",
            f"limited by the host: the device was idle {idle} of the time with work queued",
        )
    waiting = _requests(window.num_waiting)
    if window.full_share >= FULL_SHARE and window.num_waiting >= 1:
        full = _percent(window.full_share)
        return "pages", f"the KV cache is full {full} of the time and {waiting} for pages"
    if window.num_waiting >= 1 and window.num_running >= BATCH_SHARE * served.max_batch:
        return "queue", f"the batch is full ({served.max_batch} requests) and {waiting}"
    return _roofline_kind(window, served)


def _roofline_kind(window: Window, served: Served) -> tuple[VerdictKind, str]:
    name, phase = main_phase(window)
    roof = served.roof
    if roof is None or phase.memory_share is None or phase.matrix_share is None:
        share = _percent(phase.busy_s / window.busy_s)
        return (
            "unknown",
            f"{name} takes {share} of the time; this machine's limits are not measured",
        )
    memory, matrix = phase.memory_share, phase.matrix_share
    if max(memory, matrix) < LOW_SHARE:
        what = "memory bandwidth" if memory >= matrix else "matrix rate"
        share = _percent(max(memory, matrix))
        return "overhead", f"{name} reaches only {share} of {_whose(roof.memory.source)} {what}"
    if memory >= matrix:
        what = "weight bandwidth" if phase.weight_share >= 0.5 else "KV-cache bandwidth"
        where = f"at {_percent(memory)} of {_whose(roof.memory.source)}"
        return "memory", f"{name} is limited by {what}, {where}"
    where = f"at {_percent(matrix)} of {_whose(roof.matrix.source)}"
    return "compute", f"{name} is limited by compute, {where}"


def _facts(window: Window, kind: VerdictKind) -> list[str]:
    facts = []
    if kind != "pages" and window.full_share > 0:
        facts.append(f"KV pages full {_percent(window.full_share)} of the time")
    if kind != "host":
        facts.append(f"host gap {_percent(window.gap_share)}")
    if window.num_preemptions:
        plural = "" if window.num_preemptions == 1 else "s"
        facts.append(f"{window.num_preemptions} preemption{plural}")
    if window.prompt_tokens and window.hit_tokens / window.prompt_tokens >= 0.01:
        hits = _percent(window.hit_tokens / window.prompt_tokens)
        facts.append(f"{hits} of prompt tokens from the prefix cache")
    if window.drafted_tokens:
        accepted = _percent(window.accepted_tokens / window.drafted_tokens)
        facts.append(f"{accepted} of drafts accepted")
    if window.active_share < QUIET_SHARE:
        facts.append(f"busy {_percent(window.active_share)} of the time")
    return facts


def _next(kind: VerdictKind, window: Window, served: Served) -> str:
    recipe = served.recipe
    if kind == "host":
        if recipe.overlap is False and not _on_cpu(served):
            return f"remove {_no('overlap')}, so that steps are launched ahead"
        return (
            "larger batches, or fewer requests with grammars (those wait for the host every token)"
        )
    if kind == "pages":
        if _kv_is_plain(served):
            return (
                f"{flag('kv.dtype')} fp8 (twice the pages), or a lower {flag('limits.max_batch')}"
            )
        return f"a higher {flag('limits.memory_share')}, or another replica"
    if kind == "queue":
        return f"a higher {flag('limits.max_batch')} if pages are free, or another replica"
    if kind == "unknown":
        return "run `ridgeline hardware` once to measure this machine's limits"
    if kind == "overhead":
        return _against_overhead(window, served)
    name, phase = main_phase(window)
    if kind == "compute":
        return _against_compute(name, served)
    return _against_memory(name, phase, served)


def _against_overhead(window: Window, served: Served) -> str:
    on_cpu = _on_cpu(served)
    if not on_cpu and not served.recipe.graphs:
        return f"remove {_no('graphs')}, so that small steps run as graphs"
    name, phase = main_phase(window)
    if name == "decode" and phase.rows < served.max_batch / 4:
        return "more concurrent requests: they would cost almost no extra time"
    if on_cpu:
        return "check for other programs using these cores"
    return "run `ridgeline bench kernels` to see what each kernel reaches here"


def _against_compute(name: str, served: Served) -> str:
    if name == "prefill" and not served.recipe.kv.prefix_cache:
        return f"remove {_no('kv.prefix_cache')}, so that shared prefixes are computed once"
    if not _is_quantized(served):
        return "`ridgeline quantize --scheme fp8` if the GPU has fp8, or another replica"
    return "another replica: this one is near the compute limit"


def _against_memory(name: str, phase: PhaseMeans, served: Served) -> str:
    assert phase.memory_share is not None, "a phase that is bound has shares"
    assert phase.matrix_share is not None, "a phase that is bound has shares"
    if phase.weight_share < 0.5:
        if _kv_is_plain(served):
            return f"{flag('kv.dtype')} fp8 (half the KV-cache reads)"
        return "shorter contexts, or another replica"
    room = min(phase.memory_share / max(phase.matrix_share, 1e-9), served.max_batch / phase.rows)
    more = ""
    if name == "decode" and room > 2:
        more = f"{_times(room)} as many concurrent requests at little extra cost"
    if not _is_quantized(served):
        less = "`ridgeline quantize --scheme int4-g128` (4-bit weights)"
    elif served.recipe.speculation.method == "none" and phase.rows <= 4:
        less = f"{flag('speculation.method')} prompt-lookup (several tokens per pass)"
    else:
        less = ""
    return ", or ".join(each for each in (less, more) if each) or "another replica"


def _is_quantized(served: Served) -> bool:
    if served.costs is None:
        return served.recipe.scheme is not None
    return served.costs.bytes_per_weight < dtype_bytes(parse_dtype(served.recipe.dtype))


def _kv_is_plain(served: Served) -> bool:
    return served.recipe.kv.dtype not in ("fp8", "int8")


def _on_cpu(served: Served) -> bool:
    return served.costs is not None and served.costs.hardware.device_type == "cpu"


def _no(name: str) -> str:
    return flag(name).replace("--", "--no-", 1)


def _whose(source: str) -> str:
    return "this machine's" if source == "measured" else "the datasheet's"


def _requests(mean: float) -> str:
    return "1 request waits" if round(mean) == 1 else f"{mean:.0f} requests wait"


def _times(factor: float) -> str:
    return f"{factor:.0f} times" if factor < 100 else "over 100 times"


def _percent(share: float) -> str:
    return f"{100 * share:.0f}%"
