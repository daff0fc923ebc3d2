"""Quantize a model, measure what it does to the answers, and keep it or say why not.

The changed model runs through the engine, as a user would run it, beside the original on the same
text. Where it breaks the bound, the matrices whose outputs suffer most are named; with `auto_mixed`
the fewest of them are left as they are that bring the model back inside.

    found = quantize(model, tokenizer, Job(parse_scheme("int4-g128"), Gptq()))
    if found.problem is None: save(found, Path("out"), source="demo", tokenizer=tokenizer)
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from torch import Tensor, nn

from ridgeline.data import Tokenizer
from ridgeline.data.calibration_text import NUM_SEQUENCES, calibration_batches, default_text
from ridgeline.engine import Engine
from ridgeline.errors import UsageError
from ridgeline.models import Transformer
from ridgeline.models.copies import with_kinds
from ridgeline.models.families import Description
from ridgeline.progress import Progress
from ridgeline.quality.divergence import Divergence, divergence
from ridgeline.quality.gate import USUAL, Bounds
from ridgeline.quality.windows import Windows, cut
from ridgeline.quantization.calibration import quantize_model
from ridgeline.quantization.files.matrix import Matrix
from ridgeline.quantization.files.save import save_quantized
from ridgeline.quantization.linear import quantizable, with_schemes
from ridgeline.quantization.methods import Rtn
from ridgeline.quantization.methods.base import Method
from ridgeline.quantization.nearest import chosen_layers
from ridgeline.quantization.scheme import Codes, Scheme
from ridgeline.quantization.work import MatrixReport, Results
from ridgeline.recipe import KV, Limits, Recipe

MEASURED_PART = 8  # without a text of its own, this part of the calibration text is measured on
MAX_TRIALS = 8  # mixtures that are measured
MAX_BATCH = 8  # windows that an engine has at once
NUM_NAMED = 5  # matrices that a refusal names
WEIGHT = ".weight"


@dataclass(frozen=True)
class Job:
    scheme: Scheme
    method: Method
    calibration: str | None = None  # text; None: the default one
    text: str | None = None  # to measure on; None: the end of the calibration text, not used for it
    num_sequences: int | None = None  # of 512 tokens, to calibrate on; None: as the method needs
    window: int = 2048
    bounds: Bounds = USUAL
    skip: tuple[str, ...] = ()  # projections that stay, by name or pattern
    auto_mixed: bool = False
    work: Path | None = None  # where finished layers are kept, so that a stopped run goes on


@dataclass(frozen=True)
class Quantized:
    """What came of it."""

    plain: Transformer  # with what the method changed besides the codes, and no codes
    codes: dict[str, tuple[Codes, Scheme]]  # by projection
    quality: Divergence
    reports: list[MatrixReport]
    stays: tuple[str, ...]  # projections that were left as they are, for the bound or as asked
    problem: str | None  # what is outside the bound
    trials: list[tuple[int, float, float]] = field(default_factory=list)  # left, KL, increase
    seconds: float = 0.0  # of finding codes, in all trials; measuring them comes on top


def quantize(
    model: Transformer, tokenizer: Tokenizer, job: Job, progress: Progress | None = None
) -> Quantized:
    calibration, text = texts(job)
    count = job.num_sequences or usual_sequences(job.method, model.embed.weight.is_cuda)
    batches = calibration_batches(tokenizer, calibration, num_sequences=count)
    window = min(job.window, model.config.max_context)
    windows = cut(text, tokenizer, window)
    asked = chosen_layers(model, job.scheme, job.skip)
    if not asked and not job.method.prunes:
        raise UsageError(f"{', '.join(job.skip)} leaves no projection to quantize; skip fewer")
    trials = Trials(model, tokenizer, job, batches, windows, progress)
    found = trials.run(left=(), asked=asked)
    if found.problem is None or not job.auto_mixed:
        return found
    return trials.fewest_left(found, asked)


def usual_sequences(method: Method, on_gpu: bool) -> int:
    """Round-to-nearest looks at data only to say how large its errors are."""
    if isinstance(method, Rtn):
        return 8
    return NUM_SEQUENCES if on_gpu else 32  # a CPU takes a second for each


def texts(job: Job) -> tuple[str, str]:
    """To calibrate on, and to measure on: never the same words."""
    calibration = default_text() if job.calibration is None else job.calibration
    if job.text is not None:
        return calibration, job.text
    end = len(calibration) - len(calibration) // MEASURED_PART
    return calibration[:end], calibration[end:]


class Trials:
    """The same model quantized with more or fewer projections, each measured."""

    def __init__(
        self,
        model: Transformer,
        tokenizer: Tokenizer,
        job: Job,
        batches: Sequence[Tensor],
        windows: Windows,
        progress: Progress | None,
    ) -> None:
        self.model, self.tokenizer, self.job = model, tokenizer, job
        self.batches, self.windows, self.progress = batches, windows, progress
        longest = max(len(window) for window in windows.tokens)
        limits = Limits(max_context=longest, max_batch=MAX_BATCH)
        self.recipe = Recipe(kv=KV(prefix_cache=False), limits=limits)
        # No more than the windows need: two engines share the device, and the model beside them.
        self.num_pages = MAX_BATCH * (2 + longest // self.recipe.kv.page_size)
        self._original: Engine | None = None
        self.done: list[tuple[int, float, float]] = []
        self.seconds = 0.0

    @property
    def original(self) -> Engine:
        if self._original is None:
            self._original = self._engine(self.model)
        return self._original

    def _engine(self, model: Transformer) -> Engine:
        return Engine(model, self.recipe, tokenizer=self.tokenizer, num_pages=self.num_pages)

    def run(self, left: Collection[str], asked: Sequence[str]) -> Quantized:
        chosen = {name for name in asked if name not in left}
        begun = time.perf_counter()
        results = quantize_model(
            self.model,
            self.batches,
            lambda name: self.job.scheme if name.removesuffix(WEIGHT) in chosen else None,
            self.job.method,
            device=self.model.embed.weight.device,
            work=self.job.work,
            progress=self.progress,
        )
        self.seconds += time.perf_counter() - begun
        plain, codes = parts_of(self.model, results)
        with self._engine(with_schemes(plain, codes)) as changed:
            quality = divergence(self.original, changed, self.windows, self.progress)
        self.done.append((len(left), quality.mean_kl.value, quality.increase.value))
        stays = tuple(name for name in quantizable(self.model) if name not in codes)
        problem = self.job.bounds.broken_by(quality)
        about = (results.reports, stays, problem, self.done, self.seconds)
        return Quantized(plain, codes, quality, *about)

    def fewest_left(self, first: Quantized, asked: Sequence[str]) -> Quantized:
        """Halving: the matrices that suffer most stay, as many as the bound asks for."""
        order = harm(first.reports, asked)
        low, high, best = 0, len(order), None  # low is outside the bound, high not known to be
        while high - low > 1 and len(self.done) < MAX_TRIALS:
            middle = (low + high) // 2
            found = self.run(order[:middle], asked)
            if found.problem is None:
                high, best = middle, found
            else:
                low = middle
        return replace(best or first, seconds=self.seconds)


def harm(reports: Sequence[MatrixReport], asked: Collection[str]) -> list[str]:
    """Projections, those first whose outputs differ most from what they were."""
    known = {report.name.removesuffix(WEIGHT): report.error_db for report in reports}
    return sorted(asked, key=lambda name: -(known.get(name) or -1e9))


def parts_of(
    model: Transformer, results: Results
) -> tuple[Transformer, dict[str, tuple[Codes, Scheme]]]:
    """A copy of the model with all floats that the method changed, and the codes."""
    plain = with_kinds(model, lambda kind: kind)
    codes: dict[str, tuple[Codes, Scheme]] = {}
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


def advice(found: Quantized) -> str:
    """One line for a model outside the bound: the numbers, and what to leave as it is."""
    worst = harm(found.reports, list(found.codes))[:NUM_NAMED]
    return (
        f"{found.problem}; nothing is written; worst are {', '.join(worst)}: leave them with "
        "--skip, or give --auto-mixed"
    )


def save(
    found: Quantized, folder: Path, *, source: str | Path | Description, tokenizer: Tokenizer
) -> None:
    matrices = {name + WEIGHT: Matrix(*pair) for name, pair in found.codes.items()}
    save_quantized(
        found.plain, folder, source=source, matrices=matrices, extra_files=tokenizer.files()
    )
