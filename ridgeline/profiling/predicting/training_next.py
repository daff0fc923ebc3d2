"""What to change next in a training run: settings that apply to it, each with the gain that it is
predicted to give, the largest first. Parts of the measured step are scaled by what the model of a
step says of them before and after the change; what would not fit into memory is left out.

    for advice in next_settings(situation):
        print(advice.flags, advice.prediction.speedup)      # --precision fp8 1.22
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ridgeline.hardware import Hardware
from ridgeline.models import ModelConfig
from ridgeline.models.training_cost import LEVELS
from ridgeline.profiling.predicting.gains import LEAST_ERROR, USUAL_ERROR, with_interval
from ridgeline.profiling.predicting.next_steps import LEAST_GAIN, Advice
from ridgeline.profiling.predicting.prediction import Prediction
from ridgeline.profiling.predicting.training_step import StepPrediction, predict_step
from ridgeline.profiling.predicting.training_work import planned_step
from ridgeline.training.config import TrainConfig
from ridgeline.training.memory.methods import TrainingMethod
from ridgeline.training.memory.plan import ALL_WEIGHTS, itemise

TrainEdit = Mapping[str, Any]


@dataclass(frozen=True)
class TrainingSituation:
    """What is known when a setting is considered."""

    model: ModelConfig
    config: TrainConfig  # nothing left open
    device: str
    hardware: Hardware
    documents: Sequence[int]
    free_bytes: int
    method: TrainingMethod = ALL_WEIGHTS
    parts: Mapping[str, float] = field(default_factory=dict)  # of the measured step, in seconds

    def predicted(self, config: TrainConfig | None = None) -> StepPrediction | None:
        step = planned_step(
            self.model, config or self.config, self.device, self.documents, self.method
        )
        return predict_step(step, self.hardware)

    def fits(self, config: TrainConfig) -> bool:
        plan = itemise(self.model, config, self.device, self.free_bytes, self.method)
        return plan.fits


def next_settings(situation: TrainingSituation, least: float = LEAST_GAIN) -> list[Advice]:
    """Those that are expected to pay."""
    before = situation.predicted()
    if before is None:
        return []
    result = []
    for title, flags, changed in candidates(situation):
        after = situation.predicted(changed)
        if after is not None and situation.fits(changed):
            advice = Advice(title, {}, flags, _gain(situation, before, after))
            result += [advice] if advice.prediction.speedup >= least else []
    return sorted(result, key=lambda advice: -advice.prediction.speedup)


def candidates(situation: TrainingSituation) -> Iterator[tuple[str, str, TrainConfig]]:
    """Changes of one thing each, that apply here: words, flags, and the config with it."""
    config = situation.config
    for precision, title in _precisions(situation):
        changed = replace(config, precision=precision)
        yield title, f"--precision {precision}", changed
    if config.recomputation in LEVELS[1:]:
        level = LEVELS[LEVELS.index(config.recomputation) - 1]
        words = "nothing computed again" if level == "none" else f"only {level} computed again"
        yield words, f"--recomputation {level}", _with_level(config, level)
    micro, total = config.batch.micro, config.batch.size
    if micro is not None and micro < total and total % (2 * micro) == 0:
        batch = replace(config.batch, micro=2 * micro)
        title = f"{2 * micro} sequences in a pass instead of {micro}"
        yield title, f"--micro-batch {2 * micro}", replace(config, batch=batch)
    if config.deterministic:
        changed = replace(config, deterministic=False)
        yield "no promise of equal bits", "--no-deterministic", changed


def _precisions(situation: TrainingSituation) -> Iterator[tuple[Any, str]]:
    """Faster ones that this device has."""
    hardware, now = situation.hardware, situation.config.precision
    on_gpu = hardware.device_type != "cpu"
    if now == "fp32" and on_gpu and hardware.ceiling("matrix_tf32") is not None:
        yield "tf32", "products in tf32"
    if now in ("fp32", "tf32"):
        yield "bf16", "work in bf16, exact weights kept"
    has_fp8 = on_gpu and hardware.ceiling("matrix_fp8") is not None
    if has_fp8 and now == "bf16" and not situation.config.qat.is_given:
        yield "fp8", "products of layers in fp8"


def _with_level(config: TrainConfig, level: Any) -> TrainConfig:
    return replace(config, recomputation=level)


def _gain(
    situation: TrainingSituation, before: StepPrediction, after: StepPrediction
) -> Prediction:
    """Each measured part by the ratio of the predicted ones."""
    measured = situation.parts or before.parts
    was_s, now_s, moved = 0.0, 0.0, ("", 0.0, 0.0)
    for name, seconds in measured.items():
        ratio = after.parts[name] / before.parts[name] if before.parts.get(name) else None
        changed_s = seconds + after.parts[name] if ratio is None else seconds * ratio
        was_s, now_s = was_s + seconds, now_s + changed_s
        if abs(changed_s - seconds) > abs(moved[2] - moved[1]):
            moved = name, seconds, changed_s
    speedup = was_s / max(now_s, 1e-12)
    width = LEAST_ERROR + USUAL_ERROR * abs(1 - 1 / max(speedup, 1e-9))
    name, seconds, changed_s = moved
    why = f"{name}: {seconds / max(was_s, 1e-12):.0%} of the step, {1e3 * seconds:.3g} to "
    return with_interval(speedup, width, why + f"{1e3 * changed_s:.3g} ms")
