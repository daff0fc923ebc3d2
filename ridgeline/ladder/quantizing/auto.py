"""The cheapest mixture of schemes inside a quality bound and a memory budget: `quantize --auto`,
and `--auto-mixed` for one scheme beside what stays as it is.

Cheapest is fewest bytes of weights, which is also what a decode step takes. For each projection:
which schemes fit it, which of these are not slower here than it is, and what each would cost
(sensitivity.py); then how far one can go (mixture.py), by quantizing and measuring whole mixtures
through the engine, as `quantize_job` does for one scheme. One scheme alone is first tried for all:
where that is inside the bound, nothing has to be estimated.

    schemes = usual_schemes("bf16", "cuda:0")
    result = quantize_auto(model, tokenizer, Job(None, Gptq()), Auto(schemes, memory=4 * 2**30))
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ridgeline.data import Tokenizer
from ridgeline.errors import QualityError, UnsupportedError, UsageError
from ridgeline.hardware.units import human_bytes
from ridgeline.ladder.quantizing.mixture import MixtureStep, Option, furthest, schemes_after, steps
from ridgeline.ladder.quantizing.quantize_job import (
    ProjectionResult,
    QuantizeJob,
    QuantizeResult,
    Trials,
    prepared,
    timed,
)
from ridgeline.ladder.quantizing.sensitivity import sensitivity
from ridgeline.models import Transformer
from ridgeline.models.transformer import Linear
from ridgeline.progress import Progress
from ridgeline.quality.divergence import Divergence
from ridgeline.quality.gate import QualityBounds
from ridgeline.quantization.choose import LayerChoice
from ridgeline.quantization.devices import check_runs
from ridgeline.quantization.linear import quantizable
from ridgeline.quantization.nearest import model_fit, not_skipped, warn_of_experts
from ridgeline.quantization.scheme import Scheme, parse_scheme
from ridgeline.quantization.sizes import MatrixSize, plain_bytes, stored_bytes, weight_bytes

log = logging.getLogger(__name__)

INT4 = ("int4-g128", "int4-g64", "int4-g32")
NO_CHOICE = (
    "choosing among schemes runs the original once for each projection, and it lies on the host; "
    "give --scheme alone, with --skip for what is to stay"
)
Speeds = Mapping[tuple[str, MatrixSize], LayerChoice]  # by scheme and shape


@dataclass(frozen=True)
class Auto:
    schemes: tuple[Scheme, ...]  # that a projection may have, besides staying as it is
    memory: int | None = None  # bytes that all weights may take as they run


def usual_schemes(dtype: str, device: str) -> tuple[Scheme, ...]:
    """One of 8 bits and those of 4. fp8 where the device has it: no larger than int8, and prompts
    are faster. On a CPU, which only decodes it, int8.
    """
    eight = "int8"
    if device != "cpu" and _runs("fp8", dtype, device):
        eight = "fp8"
    return tuple(parse_scheme(name) for name in (eight, *INT4) if _runs(name, dtype, device))


def _runs(name: str, dtype: str, device: str) -> bool:
    try:
        check_runs(parse_scheme(name), dtype, device)
    except UnsupportedError:
        return False
    return True


def quantize_auto(
    model: Transformer,
    tokenizer: Tokenizer,
    job: QuantizeJob,
    auto: Auto,
    progress: Progress | None = None,
) -> QuantizeResult:
    """The smallest model that is inside the bound; QualityError where there is none, or none that
    fits the budget.
    """
    if job.method.prunes:
        raise UsageError(f"{job.method.name} prunes; choosing schemes goes with gptq, awq or rtn")
    assert not job.walked, NO_CHOICE
    fit = model_fit(model, auto.schemes[0], job.skip) if len(auto.schemes) == 1 else None
    if fit is not None and 0 < len(fit.unfit) < fit.num_projections:
        log.warning("scheme %s", fit.in_words())
    warn_of_experts(model)
    trials = prepared(model, tokenizer, job, progress)
    speeds = {
        (scheme.name, MatrixSize(choice.num_outputs, choice.depth)): choice
        for scheme in auto.schemes
        for choice in timed(model, scheme, job, progress)
    }
    candidates = possible(model, auto.schemes, job.skip, speeds)
    all_bytes = weight_bytes(model.config, model.embed.weight.dtype, head=trials.head)
    check_budget(model, candidates, auto, speeds, all_bytes)
    trials.expect(candidates)
    whole = _whole(trials, candidates) if len(auto.schemes) == 1 else None
    if whole is not None and whole.problem is None:
        result, options = whole, options_of(model, candidates, None)
    else:
        costs = sensitivity(model, trials.batches, candidates, progress)
        options = options_of(model, candidates, costs)
        result = _search(trials, steps(options), all_bytes, whole)
    _check_memory(result, auto)
    places = placed(model, result, options, job.skip, speeds)
    if result is whole:
        places = [replace(position, kl=None) for position in places]
    return trials.finished(replace(result, places=places, choices=tuple(speeds.values()), fit=fit))


def possible(
    model: Transformer, schemes: Sequence[Scheme], skip: Sequence[str], speeds: Speeds
) -> dict[str, list[Scheme]]:
    """The schemes that each projection may have: they fit, and are not slower here."""
    layers, wanted = quantizable(model), not_skipped(model, skip)
    return {
        name: [scheme for scheme in schemes if name in wanted and _suits(scheme, layer, speeds)]
        for name, layer in layers.items()
    }


def _suits(scheme: Scheme, layer: Linear, speeds: Speeds) -> bool:
    matrix = MatrixSize(*layer.weight.shape)
    choice = speeds.get((scheme.name, matrix))
    return scheme.fits(*matrix) and (choice is None or choice.quantize)


def options_of(
    model: Transformer,
    candidates: Mapping[str, Sequence[Scheme]],
    costs: Mapping[str, Mapping[str, float]] | None,
) -> dict[str, list[Option]]:
    """Without costs, which only a search needs, all are free."""
    result = {}
    for name, layer in quantizable(model).items():
        matrix, dtype = MatrixSize(*layer.weight.shape), layer.weight.dtype
        options = [Option(None, plain_bytes(matrix, dtype), 0.0)]
        for scheme in candidates[name]:
            size = stored_bytes(scheme, matrix, dtype)
            kl = 0.0 if costs is None else costs[name][scheme.name]
            options.append(Option(scheme, size, kl))
        result[name] = options
    return result


def check_budget(
    model: Transformer,
    candidates: Mapping[str, Sequence[Scheme]],
    auto: Auto,
    speeds: Speeds,
    all_bytes: int,
) -> None:
    """What no mixture can do is said before anything is measured. `all_bytes` are those of the
    model with plain projections.
    """
    names = ", ".join(scheme.name for scheme in auto.schemes)
    slower = any(not choice.quantize and choice.times for choice in speeds.values())
    hint = "; --batch-sizes none allows slower ones" if slower else ""
    if not any(candidates.values()):
        raise UsageError(f"no projection can be quantized in {names}{hint}; try int8")
    if auto.memory is None:
        return
    smallest = all_bytes
    for options in options_of(model, candidates, None).values():
        smallest -= options[0].num_bytes - min(option.num_bytes for option in options)
    if smallest > auto.memory:
        raise UsageError(
            f"--memory is {human_bytes(auto.memory)}, and the smallest mixture of {names} takes "
            f"{human_bytes(smallest)}; give at least that, or smaller --schemes{hint}"
        )


def _whole(trials: Trials, candidates: Mapping[str, Sequence[Scheme]]) -> QuantizeResult:
    """Everything that may be quantized, in its only scheme."""
    return trials.run({name: schemes[0] for name, schemes in candidates.items() if schemes})


def _search(
    trials: Trials, path: list[MixtureStep], total_bytes: int, whole: QuantizeResult | None
) -> QuantizeResult:
    """`whole` is what all steps together came to, where that was tried."""
    last, inside = [] if whole is None else [whole], list[QuantizeResult]()

    def share_of_bound(count: int) -> float:
        result = trials.run(schemes_after(path[:count]))
        last[:] = [result]
        if result.problem is None:
            inside[:] = [result]  # each is smaller than the one before
        return bound_share(trials.job.bounds, result.quality)

    likely = 1.0 / trials.job.bounds.max_kl if trials.job.bounds.max_kl else 0.0
    known = None if whole is None else bound_share(trials.job.bounds, whole.quality)
    furthest(path, share_of_bound, likely=likely, total_bytes=total_bytes, whole=known)
    if not inside:
        raise QualityError(
            f"{last[0].problem}, with {len(last[0].codes)} projections quantized, and none of the "
            f"{len(trials.done)} mixtures measured is inside the bound; nothing is written; "
            "allow more with --max-kl and --max-ppl-increase, or give larger schemes"
        )
    return inside[0]


def bound_share(bounds: QualityBounds, divergence: Divergence) -> float:
    """How much of the bound is used up: more than 1 is outside."""
    shares = [0.0]
    for allowed, value in (
        (bounds.max_kl, divergence.mean_kl.value),
        (bounds.max_ppl_increase, divergence.increase.value),
    ):
        if allowed is not None and value > 0:
            shares.append(value / allowed if allowed else float("inf"))
    return max(shares)


def _check_memory(result: QuantizeResult, auto: Auto) -> None:
    if auto.memory is not None and result.weight_bytes > auto.memory:
        size, kl = human_bytes(result.weight_bytes), result.quality.mean_kl.value
        raise QualityError(
            f"--memory is {human_bytes(auto.memory)}, and the smallest mixture found inside the "
            f"bound takes {size} (mean KL {kl:.4f}); nothing is written; allow more with --max-kl "
            "and --max-ppl-increase, or more --memory"
        )


def placed(
    model: Transformer,
    result: QuantizeResult,
    options: Mapping[str, Sequence[Option]],
    skip: Sequence[str],
    speeds: Speeds,
) -> list[ProjectionResult]:
    """What each projection became, and why it is no smaller."""
    rows, wanted = [], not_skipped(model, skip)
    for name, layer in quantizable(model).items():
        scheme = result.codes[name][1] if name in result.codes else None
        own = next(option for option in options[name] if option.scheme == scheme)
        smaller = [option for option in options[name] if option.num_bytes < own.num_bytes]
        slower = [
            choice
            for (_, shape), choice in speeds.items()
            if shape == tuple(layer.weight.shape) and choice.times and not choice.quantize
        ]
        label = None if scheme is None else scheme.name
        why = _why(own, smaller, slower) if name in wanted else "left as asked"
        rows.append(ProjectionResult(name, label, own.num_bytes, own.kl, why))
    return rows


def _why(own: Option, smaller: Sequence[Option], slower: Sequence[LayerChoice]) -> str:
    if smaller:
        best = min(smaller, key=lambda option: option.kl)
        assert best.scheme is not None
        return f"{best.scheme.name} would cost a KL of {best.kl - own.kl:.2g}"
    if slower:
        return f"{slower[0].scheme} is slower: {slower[0].reason}"
    return "no scheme fits" if own.scheme is None else "the smallest that fits"
