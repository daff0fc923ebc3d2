"""The climb before it is climbed: what is guessed to be fastest, and what each change would give to
the engine's defaults. Nothing is run; the speed of the defaults is the model's, not a measurement.

    preview(prepared(order))["guess"]
"""

from __future__ import annotations

from functools import partial
from typing import Any

from ridgeline.ladder.guessing.answer import default_states, expected_recipe, may_be_guessed
from ridgeline.ladder.guessing.first_guess import expected_situation, first_guess
from ridgeline.ladder.order import ClimbJob, lengths_of
from ridgeline.ladder.rungs import MOVES, Offer, RungContext
from ridgeline.profiling.predicting.gains import predict

NOTE = "predicted from the roofline alone; `ridgeline optimize` measures"


def preview(job: ClimbJob) -> dict[str, Any]:
    start, facts = default_states()[0], job.facts
    filled = expected_recipe(job, start)
    situation = expected_situation(facts, start, filled, lengths_of(job.workload))
    guess = first_guess(
        facts, lengths_of(job.workload), start, filled, partial(may_be_guessed, job)
    )
    rows: list[dict[str, Any]] = []
    for rung in MOVES:
        offer = rung.offer(RungContext(facts, start, filled))
        applies = isinstance(offer, Offer)
        gain = predict(situation, offer.edit).to_json() if isinstance(offer, Offer) else None
        reason = offer.reason if isinstance(offer, Offer) else offer
        rows.append(
            {"name": rung.name, "title": rung.title, "applies": applies, "reason": reason}
            | {"predicted": gain}
        )
    rows.sort(key=lambda row: -(row["predicted"]["speedup"] if row["predicted"] else 0.0))
    return {
        "model": job.subject.name,
        "device": job.hardware.name,
        "workload": job.workload.name,
        "guess": {
            "edit": dict(guess.edit),
            "title": guess.title or "the defaults as they are",
            "predicted": guess.predicted.to_json(),
        },
        "rungs": rows,
        "note": NOTE,
    }
