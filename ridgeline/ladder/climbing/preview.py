"""The ladder before it is climbed: each rung with what it would give if all that is predicted to
help were kept. Nothing is run; the naive loop's own speed is the model's, not a measurement.

    preview(prepared(order))["rungs"]
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ridgeline.formats.dtypes import parse_dtype
from ridgeline.ladder.climbing.order import ClimbJob
from ridgeline.ladder.rungs import STAGES, Offer, Rung, RungContext
from ridgeline.ladder.state import ClimbState, applied, baseline
from ridgeline.models.cost import MeanStep
from ridgeline.profiling.predicting.gains import kv_bytes, predict, state_of
from ridgeline.profiling.predicting.prediction import PhaseTime, Prediction, Situation
from ridgeline.profiling.predicting.step_model import modelled, planned_bytes_per_weight
from ridgeline.recipe import Recipe, with_auto

NOTE = "predicted from the roofline alone; `ridgeline optimize` measures each"


def preview(job: ClimbJob) -> dict[str, Any]:
    state, rows = baseline(job.subject.device), list[dict[str, Any]]()
    for stage in STAGES:
        remaining = list(stage)
        while remaining:
            offers = {rung.name: _offer(job, state, rung) for rung in remaining}
            gains = {
                name: _predicted(job, state, offer)
                for name, offer in offers.items()
                if isinstance(offer, Offer)
            }
            if not gains:
                rows += [_row(rung, str(offers[rung.name]), None) for rung in remaining]
                break
            best = max(gains, key=lambda name: gains[name].speedup)
            rung = next(rung for rung in remaining if rung.name == best)
            remaining.remove(rung)
            offer = offers[best]
            assert isinstance(offer, Offer), "gains are of offers"
            rows.append(_row(rung, offer.reason, gains[best]))
            if gains[best].speedup > 1.0 or rung.is_essential:
                state = applied(state, offer.edit)
    return {
        "model": job.subject.name,
        "device": job.hardware.name,
        "workload": job.workload.name,
        "rungs": rows,
        "note": NOTE,
    }


def _filled(job: ClimbJob, state: ClimbState) -> Recipe:
    dtype = parse_dtype(state.recipe.dtype)
    return with_auto(state.recipe, job.subject.config, dtype, job.subject.device)


def _offer(job: ClimbJob, state: ClimbState, rung: Rung) -> Offer | str:
    return rung.offer(RungContext(job.facts, state, _filled(job, state)))


def _predicted(job: ClimbJob, state: ClimbState, offer: Offer) -> Prediction:
    filled, config, facts = _filled(job, state), job.subject.config, job.facts
    situation = Situation(
        config,
        filled,
        state.loop,
        job.hardware,
        planned_bytes_per_weight(config, filled),
        kv_bytes(config, filled),
        (),
        float(facts.concurrency),
        facts.prefix_share,
    )
    work = _decode_work(job, filled, state)
    parts = modelled(state_of(situation), work)
    busy = parts.matrices_s + parts.attention_s + parts.other_s
    waiting = max(parts.gap_s, parts.launch_s - busy)
    phase = PhaseTime("decode", 1.0, busy + waiting + parts.host_s, work)
    situation = replace(situation, phases=(phase,))
    return predict(situation, {k: v for k, v in offer.edit.items() if k != "folder"})


def _decode_work(job: ClimbJob, filled: Recipe, state: ClimbState) -> MeanStep:
    """A step in the middle of the workload's outputs, of as many requests as share one."""
    requests, rows = job.workload.requests, 1
    if state.loop == "engine":
        rows = min(job.facts.concurrency, filled.limits.filled().max_batch)
    lengths = [request.num_prompt_tokens + request.num_output_tokens / 2 for request in requests]
    keys = rows * sum(lengths) / len(lengths)
    return MeanStep(rows, rows, rows, keys, keys)


def _row(rung: Rung, reason: str, predicted: Prediction | None) -> dict[str, Any]:
    gain = None if predicted is None else predicted.to_json()
    return {"name": rung.name, "title": rung.title, "reason": reason, "predicted": gain}
