"""Rounds of the engine and of llama.cpp in turns, for `ridgeline bench engine --peer llama.cpp`.

runs, peers = beside_llama_cpp(engine, path, workload, hardware, rounds=3, progress=None)
"""

from __future__ import annotations

import sys
from dataclasses import replace

import torch

from ridgeline.bench.engine import EngineRun, run_workload
from ridgeline.bench.llama_cpp import LlamaCpp, check_gguf
from ridgeline.bench.peers import PeerRun, llama_cpp_runs
from ridgeline.data.workload import Workload
from ridgeline.engine import Engine
from ridgeline.hardware import Hardware
from ridgeline.progress import Progress


def beside_llama_cpp(
    engine: Engine,
    source: object,
    workload: Workload,
    hardware: Hardware,
    rounds: int,
    progress: Progress | None,
) -> tuple[list[EngineRun], list[PeerRun]]:
    """A round of ours, a round of theirs, and so on: whatever else the machine does, it does to
    both. Of their rounds the median of each kind counts.
    """
    longest = max(request.num_tokens for request in workload.requests)
    path, threads = check_gguf(source), torch.get_num_threads()
    peer = LlamaCpp(path, threads, context=longest + 1, num_requests=len(workload.requests))
    print(f"llama.cpp, {threads} threads: {peer.build}", file=sys.stderr)
    runs: list[EngineRun] = []
    theirs: dict[str, list[PeerRun]] = {}
    try:
        for _ in range(rounds):
            runs.append(run_workload(engine, workload, hardware, progress))
            for run in llama_cpp_runs(peer, workload, progress):
                theirs.setdefault(run.name, []).append(replace(run, build=peer.build))
    finally:
        peer.close()
    medians = [
        sorted(each, key=lambda run: run.output_tokens_per_s)[len(each) // 2]
        for each in theirs.values()
    ]
    return runs, medians
