"""Run folders of `ridgeline train` as points of a scaling law: the parameters a token is multiplied
with, the tokens that were learned, the held-out loss at the end.

    points, left_out = law_points([Path("run-1"), Path("run-2")])
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ridgeline.errors import UsageError
from ridgeline.models.checkpoint import open_checkpoint
from ridgeline.models.cost import num_active_parameters
from ridgeline.models.families import describe
from ridgeline.training.config import TrainConfig
from ridgeline.training.config_file import FILE_NAME, load_config
from ridgeline.training.run import LOSS
from ridgeline.training.saving.checkpoint import last_whole
from ridgeline.training.schedule import Counters, share_done
from ridgeline.training.watching.metrics import read_metrics
from ridgeline.tuning.scaling.law import LawPoint


def run_folders(paths: Sequence[Path]) -> list[Path]:
    """Those given, and those inside a folder that is no run itself."""
    result = []
    for path in paths:
        if (path / FILE_NAME).is_file() and (path / "metrics.jsonl").is_file():
            result.append(path)
            continue
        inside = sorted(each.parent for each in path.glob(f"*/{FILE_NAME}"))
        if not inside:
            raise UsageError(
                f"{path} is no run of `ridgeline train` with a metrics.jsonl, and has none inside"
            )
        result += inside
    return list(dict.fromkeys(result))


def law_points(folders: Sequence[Path]) -> tuple[list[LawPoint], list[str]]:
    """And why the others were left out. Runs on different text are refused."""
    points, configs, left_out = list[LawPoint](), list[TrainConfig](), list[str]()
    texts: dict[tuple[str | None, float], Path] = {}
    for folder in folders:
        config = load_config(folder)
        problem = _problem(config, read_metrics(folder))
        if problem is not None:
            left_out.append(f"{folder}: {problem}")
            continue
        texts.setdefault((config.data.path, config.data.held_out), folder)
        points.append(_point(folder))
        configs.append(replace(config, seed=0))
    if len(texts) > 1:
        (one, first), (other, second) = list(texts.items())[:2]
        raise UsageError(
            f"{first} was held to {one[0]} and {second} to {other[0]}: losses of different text "
            "do not compare; give runs on the same --data with the same --held-out"
        )
    kept, beaten = _best_settings(points, configs)
    return kept, left_out + beaten


def _best_settings(
    points: Sequence[LawPoint], configs: Sequence[TrainConfig]
) -> tuple[list[LawPoint], list[str]]:
    """Of runs with as many parameters and tokens those with the settings that ended lowest, of any
    seed: a law is of the best that a size can do.
    """
    kept, left_out = list[LawPoint](), list[str]()
    for point, config in zip(points, configs, strict=True):
        size = (round(point.parameters), round(point.tokens))
        same = [
            (other, own)
            for other, own in zip(points, configs, strict=True)
            if (round(other.parameters), round(other.tokens)) == size
        ]
        best, settings = min(same, key=lambda each: each[0].loss)
        if config == settings:
            kept.append(point)
        else:
            left_out.append(f"{point.name}: {best.name}, of its size and tokens, ended lower")
    return kept, left_out


def _problem(config: TrainConfig, rows: Sequence[dict[str, Any]]) -> str | None:
    steps = [row for row in rows if "lr" in row]
    if not steps:
        return "it has no metrics of steps"
    if config.lora.rank is not None or config.distill.teacher is not None:
        return "its loss is not that of a model trained as a whole"
    last = steps[-1]
    counters = Counters(last["step"], 0, last["tokens"], last["seconds"])
    if config.end.minutes is None and share_done(config.end, counters) < 1:
        return f"it is not at its end ({share_done(config.end, counters):.0%})"
    if not any(LOSS in row and row["step"] == last["step"] for row in rows):
        return "it has no held-out loss at its end"
    return None


def _point(folder: Path) -> LawPoint:
    rows = read_metrics(folder)
    last = [row for row in rows if "lr" in row][-1]
    (loss,) = [row[LOSS] for row in rows if LOSS in row and row["step"] == last["step"]][:1]
    checkpoint = last_whole(folder).checkpoint
    if checkpoint is None:
        raise UsageError(f"{folder} has no checkpoint, from which the model's size would be read")
    model = describe(open_checkpoint(checkpoint)).config
    parameters = float(num_active_parameters(model))
    return LawPoint(str(folder), parameters, float(last["tokens"]), float(loss))
