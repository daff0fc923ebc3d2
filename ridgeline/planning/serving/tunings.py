"""By how much our engine's steps are off from what the model of a step says, and how sure a figure
is: fitted once, to records of results/, and judged on the others there and on published points of
other engines. `ridgeline plan --validate` shows both.

    tuning_for("H200").prompts, sureness("H200").tpot
"""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.planning.serving.step_times import Tuning

# Fitted to bench-engine-llama-3-1-8b-bf16-throughput-nvidia-h200-2026-11-17-2 and
# …-bf16-batch-1-compared-…-2; judged on the others of 2026-11-17 in bf16 and fp8: TPOT of 512
# requests within 3%, their median TTFT and its p99 within 6%, TPOT at batch 1 within 2%.
H200 = Tuning(prompts=1.05, fixed=0.31, request_s=0.0015)
# What another GPU does with the same engine was not measured; its kernels are the same.
ELSEWHERE = Tuning(prompts=1.05, fixed=0.31, request_s=0.002)


@dataclass(frozen=True)
class Sureness:
    """How far off four of five figures are at most, as a share, and what that rests on."""

    tpot: float
    ttft: float
    throughput: float
    basis: str


MEASURED = Sureness(0.08, 0.15, 0.08, "our engine's own runs on the H200, one GPU")
# Of judged points 94% of TPOT, 80% of TTFT and 93% of tokens/s are within (2026-11-19); engines
# batch first tokens in ways of their own.
PUBLISHED = Sureness(
    0.25, 0.65, 0.25, "published points of other engines; this engine was not measured here"
)


def tuning_for(gpu: str) -> Tuning:
    return H200 if gpu == "H200" else ELSEWHERE


def sureness(gpu: str, num_ranks: int) -> Sureness:
    return MEASURED if gpu == "H200" and num_ranks == 1 else PUBLISHED
