"""Times the configurations an op offers for its bench cases; kernels/autotune.py remembers them.

for row in tune_ops(all_ops(), hardware): print(row.key, row.best, row.seconds)
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ridgeline.bench.kernels.ops import input_sets, share_of_ceiling, time_calls
from ridgeline.hardware import Hardware
from ridgeline.kernels.autotune import tune
from ridgeline.kernels.op import Case, Op, OpInputs
from ridgeline.progress import Progress

TARGET_S = 0.02  # a configuration: long enough for a ranking, short enough for hundreds


@dataclass(frozen=True)
class Tuned:
    op: str
    key: str
    num_tried: int
    best: str  # the configuration, as JSON, or the peer that is faster
    seconds: float
    share: float | None  # of the ceiling that bounds it


def tune_ops(
    ops: Iterable[Op], hardware: Hardware, *, only: str = "", progress: Progress | None = None
) -> list[Tuned]:
    """`only` keeps the cases whose `op label` contains it."""
    todo = [
        (op, case)
        for op in ops
        if op.search is not None
        for case in op.bench_cases
        if only in f"{op.name} {case.label}"
    ]
    result = []
    for done, (op, case) in enumerate(todo):
        if progress is not None:
            progress("tuning", done, len(todo))
        result.append(tune_case(op, case, hardware))
        torch.cuda.empty_cache()
    return [tuned for tuned in result if tuned is not None]


def tune_case(op: Op, case: Case, hardware: Hardware) -> Tuned | None:
    assert op.search is not None, f"{op.name} has nothing to choose"
    sets = input_sets(case, op, hardware)
    search = op.search(**sets[0])
    if search is None:
        return None
    configs = {_name(config): config for config in search.configs}

    def seconds(config: Any) -> float:
        if isinstance(config, str):
            return time_calls(op.baselines[config], sets, hardware, TARGET_S).median_s
        chosen = configs[_name(config)]

        def launch(**inputs: Any) -> Any:
            return op.launch(**{**inputs, "config": chosen})

        return time_calls(launch, sets, hardware, TARGET_S).median_s

    times = tune(
        search.op,
        search.key,
        [*(asdict(config) for config in search.configs), *search.peers],
        seconds,
        hardware.name,
    )
    best = min(times, key=times.__getitem__)
    config = json.loads(best) if best.startswith("{") else best
    # Once more: the choice may come from another case of the same range of shapes. One that is no
    # longer offered cannot be run.
    offered = isinstance(config, str) or _name(config) in configs
    best_s = seconds(config) if offered else times[best]
    share, _ = share_of_ceiling(op.cost(**sets[0]), best_s, hardware)
    return Tuned(search.op, search.key, len(times), best, best_s, share)


def _name(config: Any) -> str:
    values: OpInputs = config if isinstance(config, dict) else asdict(config)
    return str(sorted(values.items()))
