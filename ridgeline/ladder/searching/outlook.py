"""What a rung would do from where the climb is: the edit it offers, its predicted gain, and what
quality may take of that.

    outlook = Outlook(facts, options, predict, progress, latest)
    outlook.promise(rung)          # 1.4
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ridgeline.errors import RidgelineError
from ridgeline.ladder.measuring.observation import Observation
from ridgeline.ladder.outcome import RungOutcome
from ridgeline.ladder.rungs import ClimbFacts, Offer, Rung, RungContext
from ridgeline.ladder.searching.progress import ClimbProgress, Options
from ridgeline.ladder.state import ClimbState, RecipeEdit, applied
from ridgeline.profiling.predicting.prediction import Prediction, Situation

log = logging.getLogger(__name__)

Predict = Callable[[Situation, RecipeEdit], Prediction]
NOT_ALONE = "which alone was not faster beyond noise"


@dataclass
class Outlook:
    facts: ClimbFacts
    options: Options
    predictor: Predict
    progress: ClimbProgress
    latest: Mapping[str, RungOutcome]  # the last outcome of each rung

    def offer(self, rung: Rung) -> Offer | str:
        now, first = self.progress, dict[str, Any]()
        if now.best.loop == "naive" and not rung.is_essential:
            engine = self._engine_edit()
            if engine is None:
                return "it changes how the engine runs, which could not be run"
            first = dict(engine)
        state = applied(now.best, first)
        filled = applied(replace(now.best, recipe=now.observation.filled), first).recipe
        offer = rung.offer(RungContext(self.facts, state, filled, self.latest))
        if isinstance(offer, str) or not first:
            return offer
        return Offer(first | dict(offer.edit), f"{offer.reason}; with the engine, {NOT_ALONE}")

    def _engine_edit(self) -> RecipeEdit | None:
        """What leads to the engine, where that alone was measured and not kept."""
        rungs = [rung for stage in self.options.stages for rung in stage if rung.is_essential]
        outcomes = [self.latest[rung.name] for rung in rungs if rung.name in self.latest]
        tried = [outcome for outcome in outcomes if outcome.achieved is not None]
        return tried[0].edit if tried else None

    def predicted(self, offer: Offer) -> Prediction | None:
        return self.predicted_from(self.progress.best, self.progress.observation, offer)

    def predicted_from(
        self, state: ClimbState, observation: Observation, offer: Offer
    ) -> Prediction | None:
        facts = self.facts
        situation = observation.situation(
            facts.config,
            state.loop,
            facts.hardware,
            float(facts.concurrency),
            facts.prefix_share,
            facts.request_tokens,
            facts.blocks,
        )
        edit = {name: value for name, value in offer.edit.items() if name != "folder"}
        try:
            return self.predictor(situation, edit)
        except RidgelineError as error:
            log.info("no prediction for %s: %s", dict(edit), error)
            return None

    def promise(self, rung: Rung) -> float:
        """The predicted speedup, less what quality may take of it."""
        offer = self.offer(rung)
        predicted = self.predicted(offer) if isinstance(offer, Offer) else None
        gain = 0.0 if predicted is None else predicted.speedup - 1.0
        judged = rung.changes_answers and self.options.quality
        return 1.0 + gain * (rung.chance if judged and gain > 0 else 1.0)

    def slower_words(self, rung: Rung) -> str | None:
        """Why it is not measured: even the best end of what is predicted is slower."""
        offer = self.offer(rung)
        predicted = self.predicted(offer) if isinstance(offer, Offer) else None
        if rung.is_essential or predicted is None or predicted.high >= 1.0:
            return None
        return (
            f"predicted to be slower than what is kept: {predicted.speedup:.2f}x "
            f"({predicted.low:.2f} to {predicted.high:.2f})"
        )
