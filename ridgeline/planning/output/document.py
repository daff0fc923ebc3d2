"""A plan for training as one document: plain values from which the table, the files that
`ridgeline train --layout` takes, and the page are made. Every predicted number has its interval.

    document = train_document(answer)
    document["plans"][0]["step_s"]      # {"value": 45.3, "low": 40.1, "high": 51.2}
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ridgeline.models.shapes import SHAPES
from ridgeline.parallel.bubbles import pass_times
from ridgeline.parallel.layout import AXES
from ridgeline.planning.clusters.cluster import Cluster, GpuPool
from ridgeline.planning.memory.ledger import usable_bytes
from ridgeline.planning.search.best import Plan, RejectedSetup
from ridgeline.planning.search.sizes import SizedSearch
from ridgeline.planning.search.why_not import WhyNot
from ridgeline.planning.training.constants import Fitted
from ridgeline.planning.training.setup import TrainSetup
from ridgeline.version import __version__

SCHEMA = 1  # of the document and of plan-N.json; raise it when a field changes its meaning
DAY_S = 86_400.0
MOST_DEVICES = 6
# A GPU draws this much of its node's most while it trains: not measured here.
DRAWN_SHARE = 0.85


@dataclass(frozen=True)
class TrainAnswer:
    model: str
    cluster: Cluster
    tokens: float | None
    searches: tuple[SizedSearch, ...]  # the whole pool first, then parts of it
    fitted: Fitted
    sequence: int
    batch: int

    @property
    def main(self) -> SizedSearch:
        return self.searches[0]


def interval(value: float, error: float) -> dict[str, float]:
    return {"value": value, "low": value / (1 + error), "high": value * (1 + error)}


def train_document(answer: TrainAnswer) -> dict[str, Any]:
    main = answer.main
    return {
        "schema": SCHEMA,
        "version": __version__,
        "model": answer.model,
        "cluster": answer.cluster.words(),
        "gpus": answer.cluster.name,
        "device": main.pool.device_name,
        "kind": main.pool.kind,
        "tokens": answer.tokens,
        "sequence": answer.sequence,
        "batch": answer.batch,
        "error": answer.fitted.error_on(main.pool.gpu.name),
        "basis": basis_of(answer.fitted, main.pool),
        "usable_bytes": usable_bytes(main.pool),
        "plans": [
            plan_json(plan, main.pool, answer, number)
            for number, plan in enumerate(main.result.plans, 1)
        ],
        "frontier": [frontier_json(each, answer) for each in answer.searches if each.result.plans],
        "why_nots": [why_not_json(each) for each in main.why_nots],
        "rejected": [rejected_json(each) for each in main.result.rejected],
        "reasons": dict(main.result.reasons),
        "num_settings": main.result.num_settings,
        "num_estimated": main.result.num_estimated,
    }


def basis_of(fitted: Fitted, pool: GpuPool) -> str:
    """What the numbers rest on, in words."""
    curves = "; collectives inside a node as measured here" if pool.curves else ""
    if fitted.is_measured:
        return f"corrected by what this machine measured (plan --calibrate){curves}"
    if not fitted.knows(pool.gpu.name):
        return (
            f"not measured here, nor checked against any published run on {pool.gpu.name}{curves}"
        )
    return f"not measured here: from published runs on the same kind of GPU{curves}"


def differences(plan: Plan, best: Plan) -> str:
    """In which settings it is another than the recommended one: `pipeline=16 (not 32)`."""
    own, its = settings_of(plan.setup), settings_of(best.setup)
    changed = [name for name in own if own[name] != its[name]]
    return ", ".join(f"{name}={own[name]} (not {its[name]})" for name in changed)


def settings_of(setup: TrainSetup) -> dict[str, Any]:
    layout = setup.layout
    axes = {name: getattr(layout, name) for name in (*AXES, "schedule")}
    return axes | {"micro-batch": setup.micro, "recomputation": setup.recomputation}


def shown_devices(count: int) -> list[int]:
    """Of a pipeline, whose memory and passes are drawn: the first, the last, some between."""
    if count <= MOST_DEVICES:
        return list(range(count))
    return sorted({round(n * (count - 1) / (MOST_DEVICES - 1)) for n in range(MOST_DEVICES)})


def plan_json(plan: Plan, pool: GpuPool, answer: TrainAnswer, number: int) -> dict[str, Any]:
    setup, estimate = plan.setup, plan.estimate
    error = answer.fitted.error_on(pool.gpu.name)
    memory_error = answer.fitted.memory_error
    timed = []
    if setup.layout.pipeline > 1:
        shown = _shown_micro(plan)
        timed = [
            {"device": each.device, "kind": each.work.kind, "stage": each.work.stage,
             "micro": each.work.micro, "begin": each.begin, "end": each.end}
            for each in pass_times(setup.layout, shown, estimate.stages, estimate.transfer_s)
            if each.device in shown_devices(setup.layout.pipeline)
        ]  # fmt: skip
    return {
        "number": number,
        "layout": setup.layout.as_json(),
        "layout_words": setup.layout.words(),
        "num_gpus": setup.layout.size,
        "differs": differences(plan, answer.main.result.plans[0]),
        "micro_batch": setup.micro,
        "num_micro": setup.num_micro,
        "recomputation": setup.recomputation,
        "precision": setup.units,
        "step_s": interval(estimate.step_s, error),
        "tokens_per_s": interval(estimate.tokens_per_s, error),
        "mfu": interval(estimate.mfu, error),
        "peak_bytes": interval(plan.ledger.peak_bytes, memory_error),
        **run_json(estimate.tokens_per_s, pool, setup.layout.size, answer, error),
        "parts": dict(estimate.parts),
        "stages": [
            {
                "device": stage.device,
                "moment": stage.moment,
                "items": [item._asdict() for item in stage.items],
            }
            for stage in plan.ledger.stages
        ],
        "timeline": timed,
    }


def _shown_micro(plan: Plan) -> int:
    """As few as show how the pipeline fills and empties."""
    pipeline = plan.setup.layout.pipeline
    rounds = 2 if pipeline <= MOST_DEVICES else 1
    rest = plan.setup.num_micro % pipeline
    return min(plan.setup.num_micro, rounds * pipeline + rest)


def run_json(
    tokens_per_s: float, pool: GpuPool, num_gpus: int, answer: TrainAnswer, error: float
) -> dict[str, Any]:
    """Of the whole run, where its tokens are given."""
    if answer.tokens is None:
        return {"days": None, "energy_mwh": None, "cost": None}
    seconds = answer.tokens / tokens_per_s
    watts = pool.power_w * num_gpus / pool.num_gpus * DRAWN_SHARE
    price = pool.price_per_gpu_hour
    hours = seconds / 3600
    cost = None if price is None else interval(hours * num_gpus * price, error)
    return {
        "days": interval(seconds / DAY_S, error),
        "energy_mwh": interval(watts * hours / 1e6, error),
        "cost": cost,
    }


def frontier_json(each: SizedSearch, answer: TrainAnswer) -> dict[str, Any]:
    best = each.result.plans[0]
    error = answer.fitted.error_on(each.pool.gpu.name)
    return {
        "gpu": _gpu_words(each, answer),
        "num_gpus": each.num_gpus,
        "layout_words": best.setup.layout.words(),
        "tokens_per_s": interval(best.estimate.tokens_per_s, error),
        "tokens_per_s_gpu": interval(best.estimate.tokens_per_s / each.num_gpus, error),
        "mfu": interval(best.estimate.mfu, error),
        **run_json(best.estimate.tokens_per_s, each.pool, each.num_gpus, answer, error),
    }


def _gpu_words(each: SizedSearch, answer: TrainAnswer) -> str:
    """Several pools are planned as so many of the slowest, with the memory of the smallest."""
    is_joined = each is answer.main and len(answer.cluster.pools) > 1
    return f"{each.pool.gpu.name} (all pools, as these)" if is_joined else each.pool.gpu.name


def why_not_json(each: WhyNot) -> dict[str, Any]:
    setup = each.setup
    return {
        "question": each.question,
        "layout_words": setup.layout.words(),
        "micro_batch": setup.micro,
        "recomputation": setup.recomputation,
        "slower": each.slower,
        "reason": each.reason,
        "remedy": each.remedy,
    }


def rejected_json(each: RejectedSetup) -> dict[str, Any]:
    return {
        "layout_words": each.setup.layout.words(),
        "micro_batch": each.setup.micro,
        "recomputation": each.setup.recomputation,
        "bound_s": each.bound_s,
        "reason": each.reason,
        "remedy": each.remedy,
    }


def plan_file(document: Mapping[str, Any], plan: Mapping[str, Any]) -> dict[str, Any]:
    """What `ridgeline train --layout plan-1.json` takes, with what `--verify` compares."""
    kept = ("schema", "version", "model", "gpus", "cluster", "sequence", "batch", "error",
            "device", "kind")  # fmt: skip
    own = {key: value for key, value in plan.items() if key not in ("timeline", "stages")}
    return {key: document[key] for key in kept} | own


def command_of(document: Mapping[str, Any], plan: Mapping[str, Any], file: str) -> str:
    """The one that runs it."""
    name = document["model"]
    model = f"--shape {name} --tokenizer TOKENIZER" if name in SHAPES else name
    parts = [
        f"ridgeline train {model}", "--data TEXT", f"--layout {file}",
        f"--sequence-length {document['sequence']}",
        f"--batch {document['batch']}", f"--micro-batch {plan['micro_batch']}",
        f"--recomputation {plan['recomputation']}", f"--precision {plan['precision']}",
    ]  # fmt: skip
    tokens = document["tokens"]
    return " ".join([*parts, f"--tokens {int(tokens)}" if tokens else "--steps 1000"])
