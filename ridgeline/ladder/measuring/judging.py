"""What a recipe does to the answers, measured in a process of its own: KL divergence and perplexity
through the recipe's own path against the unmodified model, a task's score where there are
questions; and codes that need a look at data, or are written for good.

    judge = Judge()
    judge.compare(path="model", device="cuda:0", state=state.to_json(), measured=…, bounds=…)
"""

from __future__ import annotations

import gc
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ridgeline.data.calibration_text import calibration_batches
from ridgeline.data.judged_text import JUDGED_WINDOW
from ridgeline.data.text_files import read_text
from ridgeline.engine import Engine
from ridgeline.engine.loading.saved import tokenizer_of
from ridgeline.errors import OutOfMemoryError, UnsupportedError
from ridgeline.ladder.outcome import Quality
from ridgeline.ladder.quantizing.quantize_job import QuantizeJob, parts_of, texts, usual_sequences
from ridgeline.ladder.state import ClimbState
from ridgeline.models import Transformer
from ridgeline.quality.divergence import KEPT_BYTES, Divergence, Original
from ridgeline.quality.gate import QualityBounds
from ridgeline.quality.tasks import TaskOptions, TaskScore, difference, run_task
from ridgeline.quality.tasks.score import tokenizer_for
from ridgeline.quality.windows import Windows, cut
from ridgeline.quantization import load_model
from ridgeline.quantization.calibrating.calibration import quantize_model
from ridgeline.quantization.files.matrix import StoredMatrix
from ridgeline.quantization.files.save import save_quantized
from ridgeline.quantization.linear import quantizable
from ridgeline.quantization.methods import Rtn, usual_method
from ridgeline.quantization.nearest import chosen_layers
from ridgeline.quantization.scheme import encode, find_grid, parse_scheme
from ridgeline.quantization.sizes import MatrixSize
from ridgeline.recipe import KV, Limits, Recipe

MAX_BATCH = 8  # windows that an engine has at once
TASK_CONTEXT = 2048  # tokens, that questions may take
WEIGHT = ".weight"


@dataclass(frozen=True)
class Measured:
    """What quality is measured on."""

    text: str | None = None  # a file; None: the built-in one (data/judged_text.py)
    window: int = JUDGED_WINDOW  # tokens
    num_windows: int = 16  # at most
    task: str | None = None
    data: str | None = None  # the task's questions
    limit: int | None = None
    shots: int | None = None  # None: as many as is usual
    examples: str | None = None
    run_code: bool = False

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def options(self) -> TaskOptions:
        examples = None if self.examples is None else Path(self.examples)
        return TaskOptions(self.limit, self.shots, examples, self.run_code)


class Judge:
    """Holds the unmodified model for all that are compared with it."""

    def __init__(self) -> None:
        self._begun: tuple[Engine, Original] | None = None
        self._score: TaskScore | None = None

    def compare(
        self,
        path: str,
        device: str,
        state: Mapping[str, Any],
        measured: Mapping[str, Any],
        bounds: Mapping[str, float | None],
    ) -> dict[str, Any]:
        settings, wanted = Measured(**measured), ClimbState.from_json(state)
        engine, original = self._begin(Path(path), device, settings)
        context = engine.max_context
        recipe = _to_measure(wanted.recipe, context)
        source = Path(wanted.folder or path)
        pages = _num_pages(context, recipe)
        with Engine(source, recipe, device=device, num_pages=pages) as changed:
            result = original.compare(changed)
            quality = quality_of(result, QualityBounds(**bounds))
            if settings.task is not None:
                quality = self._with_task(quality, engine, changed, settings)
        del changed
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return asdict(quality)

    def _begin(self, path: Path, device: str, settings: Measured) -> tuple[Engine, Original]:
        if self._begun is None:
            context = (
                settings.window if settings.task is None else max(settings.window, TASK_CONTEXT)
            )
            engine = unmodified(path, device, context)
            windows = first_windows(engine, settings)
            self._begun = engine, Original(engine, windows, KEPT_BYTES)
        return self._begun

    def _with_task(
        self, quality: Quality, original: Engine, changed: Engine, settings: Measured
    ) -> Quality:
        assert settings.task is not None, "a task was asked for"
        assert settings.data is not None, "a task has questions"
        questions, options = Path(settings.data), settings.options()
        if self._score is None:
            self._score = run_task(settings.task, original, questions, options)
        score = run_task(settings.task, changed, questions, options)
        less = difference(self._score, score)
        before, after = self._score.share.value, score.share.value
        problem = quality.problem
        if less.high is not None and less.high < 0.0:
            worse = f"{settings.task} fell from {before:.1%} to {after:.1%}, beyond noise"
            problem = "; ".join(filter(None, (problem, worse)))
        return replace(
            quality, problem=problem, task=settings.task, task_score=after, task_score_before=before
        )


def unmodified(path: Path, device: str, context: int) -> Engine:
    """In fp32, or where that does not fit, as it would be run by default."""
    error: OutOfMemoryError | None = None
    for dtype in ("fp32", "auto"):
        recipe = _to_measure(Recipe(dtype=dtype), context)
        try:
            return Engine(path, recipe, device=device, num_pages=_num_pages(context, recipe))
        except OutOfMemoryError as short:
            error = short
    assert error is not None, "two were tried"
    raise error


def _to_measure(recipe: Recipe, context: int) -> Recipe:
    """The same arithmetic, with no more memory than measuring takes."""
    kv = KV(recipe.kv.dtype, recipe.kv.page_size, prefix_cache=False)
    return replace(recipe, kv=kv, limits=Limits(max_context=context, max_batch=MAX_BATCH))


def _num_pages(context: int, recipe: Recipe) -> int:
    return MAX_BATCH * (2 + context // recipe.kv.page_size)


def first_windows(engine: Engine, settings: Measured) -> Windows:
    text = measured_text(settings.text)
    window = min(settings.window, engine.config.max_context)
    result = cut(text, tokenizer_for(engine), window, settings.text or "the default text")
    return Windows(result.tokens[: settings.num_windows], result.num_bytes[: settings.num_windows])


def measured_text(file: str | None) -> str:
    """Never words that codes were calibrated on."""
    return texts(QuantizeJob(None, Rtn()))[1] if file is None else read_text(Path(file))


def quality_of(divergence: Divergence, bounds: QualityBounds) -> Quality:
    kl, more = divergence.mean_kl, divergence.increase
    return Quality(
        kl.value,
        kl.low,
        kl.high,
        more.value,
        more.low,
        more.high,
        sum(len(window) for window in divergence.kl),
        bounds.broken_by(divergence),
    )


def calibrate(path: str, device: str, scheme: str, dtype: str, folder: str) -> dict[str, Any]:
    """Codes found by the scheme's usual method on the default text, as a checkpoint."""
    wanted = parse_scheme(scheme)
    method = usual_method(wanted)
    model = load_model(Path(path), dtype=dtype, device=device)
    tokenizer = tokenizer_of(Path(path))
    if tokenizer is None:
        raise UnsupportedError(f"{path} has no tokenizer, which calibration text needs")
    count = usual_sequences(method, model.embed.weight.is_cuda)
    text = texts(QuantizeJob(None, method))[0]
    names = set(chosen_layers(model, wanted))
    results = quantize_model(
        model,
        calibration_batches(tokenizer, text, num_sequences=count),
        lambda name: wanted if name.removesuffix(WEIGHT) in names else None,
        method,
        device=model.embed.weight.device,
    )
    plain, codes = parts_of(model, results)
    _save(
        plain, Path(folder), Path(path), {name: StoredMatrix(*pair) for name, pair in codes.items()}
    )
    return {"folder": folder, "method": method.name}


def write_codes(
    path: str, scheme: str, dtype: str, folder: str, plain: list[list[int]]
) -> dict[str, Any]:
    """What a recipe's scheme makes of a checkpoint when it is loaded, as a checkpoint; matrices of
    the shapes in `plain` stay. On the host: it is done once.
    """
    wanted = parse_scheme(scheme)
    model = load_model(Path(path), dtype=dtype, device="cpu")
    shapes = [MatrixSize(*shape) for shape in plain]
    result = {}
    for name in chosen_layers(model, wanted, plain=shapes):
        weight = quantizable(model)[name].weight.detach()
        result[name] = StoredMatrix(encode(weight, find_grid(weight, wanted), wanted), wanted)
    _save(model, Path(folder), Path(path), result)
    return {"folder": folder}


def _save(
    model: Transformer, folder: Path, source: Path, codes: Mapping[str, StoredMatrix]
) -> None:
    tokenizer = tokenizer_of(source)
    files = {} if tokenizer is None else tokenizer.files()
    by_weight = {name + WEIGHT: matrix for name, matrix in codes.items()}
    save_quantized(model, folder, source=source, matrices=by_weight, extra_files=files)
