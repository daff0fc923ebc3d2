"""Quantize a model, measure what it does to the answers, and keep it or say why not.

The changed model runs through the engine, as a user would run it, beside the original on the same
text. Where it breaks the bound, the matrices whose outputs suffer most are named. Matrices whose
product is slower here when they are quantized are left. For mixtures, of several schemes or of one
and what stays, see auto.py, which measures more than one model: `Trials` keeps what these share. A
model that the device has no room for may lie on the host (original_device.py).

    result = quantize(model, tokenizer, Job(parse_scheme("int4-g128"), Gptq()))
    if result.problem is None: save(result, Path("out"), source="demo", tokenizer=tokenizer)
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from ridgeline.data import Tokenizer
from ridgeline.data.calibration_text import NUM_SEQUENCES, calibration_batches, default_text
from ridgeline.data.judged_text import JUDGED_WINDOW, judged_text
from ridgeline.engine import Engine
from ridgeline.engine.loading.layer_speed import measured_choices
from ridgeline.errors import UsageError
from ridgeline.formats.dtypes import dtype_name
from ridgeline.hardware.detection import available_memory, peak_device_bytes
from ridgeline.kernels.host_library import prepare
from ridgeline.ladder.quantizing.recovery import RecoveryOptions, RecoveryReport, recover
from ridgeline.models import Transformer
from ridgeline.models.copies import on_device, with_kinds
from ridgeline.models.families import Description
from ridgeline.progress import Progress
from ridgeline.quality.divergence import KEPT_BYTES, Divergence, Original, Scores
from ridgeline.quality.gate import USUAL, QualityBounds
from ridgeline.quality.walked import Walked
from ridgeline.quality.windows import Windows, cut
from ridgeline.quantization.calibrating.alternatives import (
    Alternatives,
    Candidates,
    find_alternatives,
)
from ridgeline.quantization.calibrating.calibration import quantize_model
from ridgeline.quantization.calibrating.work import MatrixReport, Results, codes_on
from ridgeline.quantization.choose import LayerChoice, in_words, slower_shapes
from ridgeline.quantization.files.matrix import StoredMatrix
from ridgeline.quantization.files.plain import PlainStorage, rounded
from ridgeline.quantization.files.save import KVScales, save_quantized
from ridgeline.quantization.fitting import SchemeFit
from ridgeline.quantization.head import with_head
from ridgeline.quantization.linear import quantizable, with_schemes
from ridgeline.quantization.methods import Rtn
from ridgeline.quantization.methods.base import Method
from ridgeline.quantization.methods.kv import KvScales, calibrate_kv
from ridgeline.quantization.nearest import chosen_layers, model_fit
from ridgeline.quantization.scheme import FP8, Codes, Scheme, parse_scheme
from ridgeline.recipe import KV, Head, Limits, Recipe, edited

log = logging.getLogger(__name__)

WINDOW = 2048  # tokens, of a text that was given
KEPT_SHARE = 4  # on a CPU, a quarter of the free memory may hold the original's logits
MAX_BATCH = 8  # windows that an engine has at once
NUM_NAMED = 5  # matrices that a refusal names
WEIGHT = ".weight"
ByProjection = dict[str, tuple[Codes, Scheme]]


@dataclass(frozen=True)
class QuantizeJob:
    scheme: Scheme | None  # None: auto.py chooses
    method: Method
    calibration: str | None = None  # text; None: the default one
    text: str | None = None  # to measure on; None: the built-in one, unlike the calibration text
    num_sequences: int | None = None  # of 512 tokens, to calibrate on; None: as the method needs
    built_in_bytes: int | None = None  # of the built-in one, its first; None: all
    window: int | None = None  # tokens; None: 2048, or 512 of the built-in text
    bounds: QualityBounds = USUAL
    skip: tuple[str, ...] = ()  # projections that stay, by name or pattern
    batch_sizes: tuple[int, ...] = ()  # for which speed decides; empty: it is not measured
    head: Head = "plain"  # as the recipe beside the checkpoint will have it
    kv: Literal["fp8", "int8"] | None = None  # of cached keys and values, with calibrated scales
    work: Path | None = None  # where finished layers are kept, so that a stopped run goes on
    device: str | None = None  # that blocks and the result run on; None: the model's own
    walked: bool = False  # the model lies on the host, and has no room on the device
    storage: PlainStorage = field(default_factory=PlainStorage)  # of weights without codes
    recovery: RecoveryOptions = field(default_factory=RecoveryOptions)  # training of the codes


@dataclass(frozen=True)
class MixtureTrial:
    """What was measured of one mixture."""

    left: int  # projections that are as they were
    weight_bytes: int  # of all weights, as they run
    mean_kl: float
    increase: float  # of the perplexity, as a share


@dataclass(frozen=True)
class ProjectionResult:
    """What became of a projection."""

    name: str
    scheme: str | None  # None: as it was
    num_bytes: int  # as it runs
    kl: float | None  # that it causes alone, in nats, where that was estimated
    why: str


@dataclass(frozen=True)
class QuantizeResult:
    """What came of it."""

    plain: Transformer  # with what the method changed besides the codes, and no codes
    codes: ByProjection
    weight_bytes: int  # of all weights, as they run
    quality: Divergence
    reports: list[MatrixReport]
    stays: tuple[str, ...]  # projections that were left as they are, for the bound or as asked
    problem: str | None  # what is outside the bound
    verdict: str  # the figures beside what is allowed, with their intervals
    storage: PlainStorage  # of weights without codes, which `plain` has rounded already
    trials: list[MixtureTrial] = field(default_factory=list)
    choices: tuple[LayerChoice, ...] = ()  # times of shapes, plain and quantized
    fit: SchemeFit | None = None  # of the scheme, where there is one for all
    places: list[ProjectionResult] = field(
        default_factory=list
    )  # where schemes were chosen (auto.py)
    kv: KvScales | None = None
    seconds: float = 0.0  # of finding codes, in all trials; measuring them comes on top
    device_bytes: int | None = None  # held of a GPU at most, until codes were found the first time
    recovery: RecoveryReport | None = None  # where the codes were trained
    before_recovery: Divergence | None = None  # what the codes were before


def quantize(
    model: Transformer, tokenizer: Tokenizer, job: QuantizeJob, progress: Progress | None = None
) -> QuantizeResult:
    assert job.scheme is not None, "auto.py chooses schemes"
    chosen = chosen_layers(model, job.scheme, job.skip)
    trials = prepared(model, tokenizer, job, progress)
    if not chosen and not job.method.prunes:
        raise UsageError(f"{', '.join(job.skip)} leaves no projection to quantize; skip fewer")
    choices = timed(model, job.scheme, job, progress)
    plain = slower_shapes(choices)
    shapes = {name: layer.weight.shape for name, layer in quantizable(model).items()}
    faster = [name for name in chosen if tuple(shapes[name]) not in plain]
    if chosen and not faster:
        text = in_words(choices, dtype_name(model.embed.weight.dtype))
        raise UsageError(f"{text}; none is left to quantize: give --batch-sizes none, or others")
    result = trials.run(dict.fromkeys(faster, job.scheme))
    if job.recovery.minutes is not None:
        result = trials.recovered(result)
    fit = model_fit(model, job.scheme, job.skip)
    return trials.finished(replace(result, choices=tuple(choices), fit=fit))


def prepared(
    model: Transformer, tokenizer: Tokenizer, job: QuantizeJob, progress: Progress | None
) -> Trials:
    calibration, text = texts(job)
    on_gpu = device_of(model, job).type != "cpu"
    count = job.num_sequences or usual_sequences(job.method, on_gpu)
    batches = calibration_batches(tokenizer, calibration, num_sequences=count)
    window = job.window
    if window is None:
        window = JUDGED_WINDOW if job.text is None else WINDOW
    windows = cut(text, tokenizer, min(window, model.config.max_context))
    return Trials(model, tokenizer, job, batches, windows, progress)


def device_of(model: Transformer, job: QuantizeJob) -> torch.device:
    return torch.device(job.device or model.embed.weight.device)


def timed(
    model: Transformer, scheme: Scheme, job: QuantizeJob, progress: Progress | None
) -> list[LayerChoice]:
    """How fast each shape is, plain and in the scheme, through the engine's kernels."""
    if not job.batch_sizes:
        return []
    device = str(device_of(model, job))
    has_experts = any(layer.experts for layer in model.config.layers)
    host_kernels = device == "cpu" and not has_experts and prepare(progress)
    return measured_choices(
        model.config,
        scheme,
        job.batch_sizes,
        model.embed.weight.dtype,
        device,
        host_kernels=host_kernels,
        progress=progress,
    )


def usual_sequences(method: Method, on_gpu: bool) -> int:
    """Round-to-nearest looks at data only to say how large its errors are."""
    if isinstance(method, Rtn):
        return 8
    return NUM_SEQUENCES if on_gpu else 32  # a CPU takes a second for each


def texts(job: QuantizeJob) -> tuple[str, str]:
    """To calibrate on, and to measure on. A text that resembles what codes were fitted to would
    flatter them; the built-in one does not.
    """
    calibration = default_text() if job.calibration is None else job.calibration
    if job.text is None:
        return calibration, judged_text(job.built_in_bytes)
    if overlaps(calibration, job.text):
        log.warning(
            "the text to measure on is part of the calibration text, so the model will look "
            "better than it is; give another text, or none for the built-in one"
        )
    return calibration, job.text


def overlaps(calibration: str, text: str) -> bool:
    return text.strip() in calibration or calibration.strip() in text


class Coded(NamedTuple):
    """What a mixture is made of."""

    plain: Transformer
    codes: ByProjection
    reports: list[MatrixReport]


class Trials:
    """The same model quantized with more or fewer projections, each measured."""

    def __init__(
        self,
        model: Transformer,
        tokenizer: Tokenizer,
        job: QuantizeJob,
        batches: Sequence[Tensor],
        windows: Windows,
        progress: Progress | None,
    ) -> None:
        self.model, self.tokenizer, self.job = model, tokenizer, job
        self.device = device_of(model, job)
        self.batches, self.windows, self.progress = batches, windows, progress
        longest = max(len(window) for window in windows.tokens)
        limits = Limits(max_context=longest, max_batch=MAX_BATCH)
        self.recipe = Recipe(kv=KV(prefix_cache=False), limits=limits)
        # No more than the windows need: two engines share the device, and the model beside them.
        self.num_pages = MAX_BATCH * (2 + longest // self.recipe.kv.page_size)
        self._original: Original | None = None
        self._kept_bytes = KEPT_BYTES
        self._alternatives: Alternatives | None = None
        self.done: list[MixtureTrial] = []
        self.seconds = 0.0
        self.device_bytes: int | None = None

    def expect(self, candidates: Candidates) -> None:
        """Many mixtures of these are to come: what they share is made once. On a GPU that is not
        the original's logits: to make them again is cheaper than their memory.
        """
        if self.device.type == "cpu":
            self._kept_bytes = max(KEPT_BYTES, available_memory("cpu") // KEPT_SHARE)
        if self.job.method.folds:
            return
        begun = time.perf_counter()
        self._alternatives = find_alternatives(
            self.model,
            self.batches,
            candidates,
            self.job.method,
            work=self.job.work,
            progress=self.progress,
        )
        self.seconds += time.perf_counter() - begun

    @property
    def head(self) -> Scheme | None:
        return None if self.job.head == "plain" else parse_scheme(self.job.head)

    @property
    def original(self) -> Original:
        if self._original is None:
            windows = self.windows
            if self.job.walked:
                scores: Scores = Walked(self.model, windows.tokens, self.device, self.progress)
            else:
                scores = self._engine(self.model, self.recipe)
            self._original = Original(scores, windows, self._kept_bytes)
        return self._original

    def _engine(self, model: Transformer, recipe: Recipe) -> Engine:
        return Engine(model, recipe, tokenizer=self.tokenizer, num_pages=self.num_pages)

    def run(self, schemes: Mapping[str, Scheme]) -> QuantizeResult:
        """With these projections quantized, each by its scheme."""
        begun = time.perf_counter()
        plain, codes, reports = self._coded(schemes)
        self.seconds += time.perf_counter() - begun
        if not self.done:
            self.device_bytes = peak_device_bytes(str(self.device))
        return self._measured(rounded(plain, self.job.storage, codes.keys()), codes, reports)

    def recovered(self, result: QuantizeResult) -> QuantizeResult:
        """With the codes trained for a time."""
        made = recover(
            result.plain,
            result.codes,
            self.model,
            self.tokenizer,
            self.job.recovery,
            calibration=self.job.calibration,
            progress=self.progress,
        )
        self.seconds += made.report.seconds
        better = self._measured(result.plain, made.codes, result.reports)
        return replace(better, recovery=made.report, before_recovery=result.quality)

    def _measured(
        self, plain: Transformer, codes: ByProjection, reports: list[MatrixReport]
    ) -> QuantizeResult:
        """Through the engine, against the original."""
        recipe = self.recipe
        if self.job.kv is not None:
            recipe = edited(recipe, "kv.dtype", self.job.kv)
        changed = coded_model(plain, codes, self.device)
        if self.head is not None:
            changed = with_head(changed, self.head)
        held = sum(parameter.nbytes for parameter in changed.parameters())
        with self._engine(changed, recipe) as engine:
            quality = self.original.compare(engine, self.progress)
        stays = tuple(name for name in quantizable(self.model) if name not in codes)
        trial = MixtureTrial(len(stays), held, quality.mean_kl.value, quality.increase.value)
        self.done.append(trial)
        bounds = self.job.bounds
        return QuantizeResult(
            plain,
            codes,
            held,
            quality,
            reports,
            stays,
            problem=bounds.broken_by(quality),
            verdict=bounds.verdict_on(quality),
            storage=self.job.storage,
            trials=self.done,
        )

    def _coded(self, schemes: Mapping[str, Scheme]) -> Coded:
        if self._alternatives is not None:
            codes, reports = (
                self._alternatives.codes(schemes),
                self._alternatives.reports(schemes),
            )
            return Coded(with_kinds(self.model, lambda kind: kind), codes, reports)
        results = quantize_model(
            self.model,
            self.batches,
            lambda name: schemes.get(name.removesuffix(WEIGHT)),
            self.job.method,
            device=self.device,
            work=self.job.work,
            keep_on_host=self.job.walked,
            progress=self.progress,
        )
        return Coded(*parts_of(self.model, results), results.reports)

    def finished(self, result: QuantizeResult) -> QuantizeResult:
        """With the time of all, and what is made only of the one that is kept."""
        result = replace(result, seconds=self.seconds, device_bytes=self.device_bytes)
        if self.job.kv is None or result.problem is not None:
            return result
        dtype = torch.int8 if self.job.kv == "int8" else FP8
        model = coded_model(result.plain, result.codes, self.device)
        return replace(result, kv=calibrate_kv(model, self.batches, dtype, progress=self.progress))


def harm(reports: Sequence[MatrixReport], names: Collection[str]) -> list[str]:
    """Projections, those first whose outputs differ most from what they were."""
    known = {report.name.removesuffix(WEIGHT): report.error_db for report in reports}
    return sorted(names, key=lambda name: -(known.get(name) or -1e9))


def coded_model(plain: Transformer, codes: ByProjection, device: torch.device) -> Transformer:
    """The model that runs. Codes may have waited on the host, and all else may lie there."""
    there = {name: (codes_on(c, device), scheme) for name, (c, scheme) in codes.items()}
    return on_device(with_schemes(plain, there), device)


def parts_of(model: Transformer, results: Results) -> tuple[Transformer, ByProjection]:
    """A copy of the model with all floats that the method changed, and the codes."""
    plain = with_kinds(model, lambda kind: kind)
    codes: ByProjection = {}
    for name, value in results.tensors():
        if isinstance(value, Codes):
            scheme = results.schemes[name]
            assert scheme is not None, f"{name} has codes and no scheme"
            codes[name.removesuffix(WEIGHT)] = (value, scheme)
            continue
        owner, _, own_name = name.rpartition(".")
        module = plain.get_submodule(owner)
        old = getattr(module, own_name)
        changed = nn.Parameter(value.to(old.dtype).to(old.device), requires_grad=False)
        setattr(module, own_name, changed)
    return plain, codes


def advice(result: QuantizeResult) -> str:
    """One line for a model outside the bound: the numbers, and what to leave as it is."""
    worst = harm(result.reports, list(result.codes))[:NUM_NAMED]
    return (
        f"{result.problem}; nothing is written; worst are {', '.join(worst)}: leave them with "
        "--skip, or give --auto-mixed"
    )


def save(
    result: QuantizeResult,
    folder: Path,
    *,
    source: str | Path | Description,
    tokenizer: Tokenizer,
    head: Head = "plain",
) -> None:
    """The head's own weights are saved, which every engine reads: ours makes codes of them where
    the recipe beside them says so.
    """
    matrices = {name + WEIGHT: StoredMatrix(*pair) for name, pair in result.codes.items()}
    kv_scales = None if result.kv is None else KVScales(result.kv.dtype, *result.kv.per_layer())
    save_quantized(
        result.plain,
        folder,
        source=source,
        matrices=matrices,
        kv_scales=kv_scales,
        storage=result.storage,
        extra_files=tokenizer.files(),
    )
    if head != "plain":
        Recipe(head=head).save(folder)
