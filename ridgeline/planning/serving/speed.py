"""How many requests a second of a trace one core simulates, step by step and with quiet rounds at
once: the best of some rounds, in CPU time. 8B in llama-3.1's shape on one H200.

    python -m ridgeline.planning.serving.speed azure2023_conv.csv
"""

from __future__ import annotations

import sys
import time

from ridgeline.data.traces import load_workload
from ridgeline.data.workload import Workload
from ridgeline.models.shapes import describe_shape
from ridgeline.planning.clusters.parsing import parse_cluster
from ridgeline.planning.serving.fleets.fleet import Fleet
from ridgeline.planning.serving.setup import EngineSetup, engine_setup
from ridgeline.planning.serving.sustained import sustained
from ridgeline.planning.serving.tunings import tuning_for
from ridgeline.recipe import Recipe

ROUNDS = {True: 7, False: 3}  # with jumps, and without


def simulated_per_s(setup: EngineSetup, workload: Workload, jumps: bool) -> float:
    best = 0.0
    for _ in range(ROUNDS[jumps]):
        begin = time.process_time()
        Fleet([setup], jumps=jumps).run(workload)
        best = max(best, len(workload.requests) / (time.process_time() - begin))
    return best


def main(path: str) -> None:
    config = describe_shape("llama-3.1-8b").config
    hardware = sustained(parse_cluster("H200").pools[0])
    setup = engine_setup(config, Recipe(), hardware, tuning_for("H200"))
    workload = load_workload(path)
    for name, jumps in (("exact", False), ("jumped", True)):
        print(f"{name}: {simulated_per_s(setup, workload, jumps):,.0f} requests/s")


if __name__ == "__main__":
    main(sys.argv[1])
