"""The last minutes of a server as points of its charts, one for each sample: rates, latencies, how
full it was, and what share of the machine it used.

Latency percentiles are of the last few seconds, so that a line is calm and still moves.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from ridgeline.engine.scheduling.histogram import percentile
from ridgeline.server.metrics.window import PhaseMeans, Sample, Window

KEPT = 600  # points: ten minutes at one a second
RATE_SAMPLES = 5  # over which a rate is taken: prompts come in lumps
LATENCY_SAMPLES = 15  # whose times make a percentile

BucketCounts = tuple[Sequence[int], Sequence[int]]  # times to the first token, and between tokens


class History:
    def __init__(self) -> None:
        self._points: deque[dict[str, Any]] = deque(maxlen=KEPT)
        self._counts: deque[tuple[list[int], list[int]]] = deque(maxlen=LATENCY_SAMPLES)
        self._tokens: deque[tuple[float, tuple[int, int]]] = deque(maxlen=RATE_SAMPLES)

    def add(
        self,
        time: float,
        sample: Sample,
        window: Window | None,
        num_tokens: tuple[int, int],
        latencies: BucketCounts,
    ) -> None:
        """`window` is since the last sample; `num_tokens` of prompts and outputs, so far."""
        point: dict[str, Any] = {"t": time, **_occupancy(sample)}
        point |= self._rates(time, num_tokens) | self._percentiles(latencies)
        if window is not None:
            point |= _shares(window)
        self._points.append(point)

    def since(self, time: float | None) -> list[dict[str, Any]]:
        return [point for point in self._points if time is None or point["t"] > time]

    def _rates(self, time: float, num_tokens: tuple[int, int]) -> dict[str, float | None]:
        first = self._tokens[0] if self._tokens else (time, num_tokens)
        self._tokens.append((time, num_tokens))
        if time <= first[0]:
            return {"prompt_per_s": None, "output_per_s": None}
        pairs = zip(num_tokens, first[1], strict=True)
        prompt, output = ((now - then) / (time - first[0]) for now, then in pairs)
        return {"prompt_per_s": prompt, "output_per_s": output}

    def _percentiles(self, latencies: BucketCounts) -> dict[str, float | None]:
        oldest = self._counts[0] if self._counts else ([0] * len(latencies[0]),) * 2
        values: dict[str, float | None] = {}
        for name, now, then in zip(("first", "inter"), latencies, oldest, strict=True):
            recent = [new - old for new, old in zip(now, then, strict=True)]
            for share in (50, 95):
                values[f"{name}_p{share}"] = percentile(recent, share / 100)
        self._counts.append((list(latencies[0]), list(latencies[1])))
        return values


def _occupancy(sample: Sample) -> dict[str, float]:
    num_pages = max(sample.num_pages, 1)
    return {
        "running": sample.num_running,
        "waiting": sample.num_waiting,
        "pages_used": sample.stats.num_pages_used / num_pages,
        "pages_cached": sample.stats.num_pages_cached / num_pages,
    }


def _shares(window: Window) -> dict[str, Any]:
    return {
        "busy": window.busy_s / window.seconds,
        "gap": window.gap_s / window.seconds,
        "decode": phase_json(window.decode),
        "prefill": phase_json(window.prefill),
    }


def phase_json(phase: PhaseMeans | None) -> dict[str, float | None] | None:
    if phase is None:
        return None
    return {
        "rows": phase.rows,
        "tokens": phase.tokens,
        "step_s": phase.step_s,
        "memory_share": phase.memory_share,
        "matrix_share": phase.matrix_share,
        "weight_share": phase.weight_share,
        "flops_per_s": phase.flops_per_s,
        "intensity": phase.intensity,
    }
