"""Chooses among a kernel's fastest configurations by the time of a whole decode layer.

Alone, calls of one kernel follow each other and each begins while the one before ends. In a layer
its neighbours are others: who starts early, who leaves room and what lies in L2 differ, and so does
the ranking. On the H200 at batch 1 the fastest four products, each alone, made 238 tokens/s where
their seconds and thirds made 251. A time in place holds for the neighbours it was taken with:
all that are known are taken anew, or an old layer's would be held against a new one's.

    for row in tune_in_place(hardware): print(row.key, row.best, row.seconds)
"""

from __future__ import annotations

import torch

from ridgeline.bench.kernels import decode_layer
from ridgeline.bench.kernels.ops import input_sets, share_of_ceiling, time_calls
from ridgeline.bench.kernels.tune import Tuned
from ridgeline.hardware import Hardware
from ridgeline.kernels.autotune import IN_PLACE, KernelConfig, asking, forced, tune
from ridgeline.kernels.op import Case
from ridgeline.progress import Progress

BATCHES = (1, 16)
CONTEXT = 1024
NUM_CANDIDATES = 6  # of each kernel: those that are next to the fastest alone
TARGET_S = 0.03


def tune_in_place(
    hardware: Hardware, *, only: str = "", progress: Progress | None = None
) -> list[Tuned]:
    """Every choice a layer asks for, one after the other, each among those made before it. `only`
    keeps the layers whose label contains it.
    """
    cases = [
        decode_layer.case(batch, CONTEXT, form, "chosen")
        for batch in BATCHES
        for form in decode_layer.FORMS
    ]
    cases = [case for case in cases if only in f"{decode_layer.OP.name} {case.label}"]
    result: list[Tuned] = []
    for done, case in enumerate(cases):
        if progress is not None:
            progress("tuning in place", done, len(cases))
        result += tune_layer(case, hardware)
        torch.cuda.empty_cache()
    return result


def tune_layer(case: Case, hardware: Hardware) -> list[Tuned]:
    sets = input_sets(case, decode_layer.OP, hardware)
    cost = decode_layer.OP.cost(**sets[0])
    with asking() as ranked_choices:
        decode_layer.OP.launch(**sets[0])
    result = []
    for (op, key), ranked in ranked_choices.items():
        if len(ranked) < 2:
            continue

        def seconds(config: KernelConfig, op: str = op, key: str = key) -> float:
            with forced(op, key, config):
                return time_calls(decode_layer.OP.launch, sets, hardware, TARGET_S).median_s

        times = tune(
            op + IN_PLACE, key, ranked[:NUM_CANDIDATES], seconds, hardware.name, again=True
        )
        best = min(times, key=times.__getitem__)
        share, _ = share_of_ceiling(cost, times[best], hardware)
        result.append(Tuned(op + IN_PLACE, key, len(times), best, times[best], share))
    return result
