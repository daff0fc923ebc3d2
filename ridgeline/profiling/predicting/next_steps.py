"""What to change next: the edits that apply to a recipe as it is, each with the gain that it is
predicted to give, the largest first.

    for advice in what_next(situation):
        print(advice.flags, advice.prediction.speedup)      # --scheme int8 1.54
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ridgeline.profiling.predicting.gains import predict
from ridgeline.profiling.predicting.prediction import Prediction, Situation
from ridgeline.quantization.scheme import parse_scheme
from ridgeline.quantization.sizes import head_matrix, model_matrices
from ridgeline.recipe import flag

LEAST_GAIN = 1.02  # predicted: less is not worth a change
FEW_ROWS = 4  # streams up to which drafted tokens are verified for nothing
MORE = 4  # times the requests at once


@dataclass(frozen=True)
class Advice:
    title: str
    edit: Mapping[str, Any]
    flags: str  # as on a command line; "" where it is not a matter of flags
    prediction: Prediction

    def to_json(self) -> dict[str, Any]:
        result = {"title": self.title, "edit": dict(self.edit), "flags": self.flags}
        return {**result, **self.prediction.to_json()}


def what_next(situation: Situation, least: float = LEAST_GAIN) -> list[Advice]:
    """Those that are expected to pay, by their predicted gain."""
    result = [
        Advice(title, edit, flags_of(edit), predict(situation, edit))
        for title, edit in candidates(situation)
        if can_be_run(situation, edit)
    ]
    more = _more_at_once(situation)
    result += [more] if more is not None else []
    paying = [advice for advice in result if advice.prediction.speedup >= least]
    return sorted(paying, key=lambda advice: -advice.prediction.speedup)


def candidates(situation: Situation) -> Iterator[tuple[str, dict[str, Any]]]:
    """Changes of one thing each, that apply here."""
    recipe, on_gpu = situation.recipe, situation.hardware.device_type != "cpu"
    if situation.loop == "naive":
        graphs = {"graphs": True} if on_gpu else {}
        yield "the engine with fused kernels", {"loop": "engine", "kernels": "fused", **graphs}
        return
    if not on_gpu and recipe.kernels != "fused":
        yield "fused kernels", {"kernels": "fused"}
    if recipe.dtype == "fp32" and situation.hardware.ceiling("matrix_bf16") is not None:
        yield "weights and work in bf16", {"dtype": "bf16"}
    if on_gpu and not recipe.graphs:
        yield "captured graphs", {"graphs": True}
    if on_gpu and recipe.overlap is False:
        yield "steps launched ahead", {"overlap": True}
    if recipe.deterministic:
        yield "no promise of equal bits", {"deterministic": False}
    yield from _smaller(situation, on_gpu)
    rows = max((p.work.rows for p in situation.phases if p.phase == "decode"), default=1.0)
    if recipe.speculation.method == "none" and rows <= FEW_ROWS:
        yield "tokens drafted from the text", {"speculation.method": "prompt-lookup"}


def can_be_run(situation: Situation, edit: Mapping[str, Any]) -> bool:
    """On as many ranks as now."""
    return situation.recipe.parallel.num_ranks == 1 or not edit.get("copies")


def _smaller(situation: Situation, on_gpu: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """Weights, keys and values in fewer bits."""
    recipe, matrices = situation.recipe, list(model_matrices(situation.config))
    is_plain = recipe.scheme is None and situation.bytes_per_weight >= 2.0
    if is_plain and not recipe.deterministic:
        names = ["int8", "int4-g128", "int4-g64", "int4-g32"]
        if on_gpu and situation.hardware.ceiling("matrix_fp8") is not None:
            names.insert(1, "fp8")
        done: set[str] = set()
        for name in names:
            scheme = parse_scheme(name)
            if scheme.weight not in done and all(scheme.fits(*each) for each in matrices):
                done.add(scheme.weight)
                yield f"weights in {name}", {"scheme": name}
    if _head_can_be_codes(situation, on_gpu):
        yield "the head in int8", {"head": "int8"}
    codes = None if recipe.scheme is None else parse_scheme(recipe.scheme)
    if on_gpu and codes is not None and codes.inputs == "16-bit" and recipe.copies is False:
        yield "weights in 16 bits too, for prompts", {"copies": True}
    if recipe.kv.dtype not in ("fp8", "int8"):
        name = "fp8" if on_gpu else "int8"
        yield f"keys and values in {name}", {"kv.dtype": name}


def _head_can_be_codes(situation: Situation, on_gpu: bool) -> bool:
    recipe = situation.recipe
    fits = parse_scheme("int8").fits(*head_matrix(situation.config))
    is_plain = recipe.head == "plain" and not (recipe.deterministic or recipe.blocks)
    return fits and is_plain and not (on_gpu and recipe.dtype == "fp32")


def _more_at_once(situation: Situation) -> Advice | None:
    """More requests in a batch: a gain in tokens/s of all together, not for one of them."""
    decode = next((p for p in situation.phases if p.phase == "decode"), None)
    if decode is None or situation.loop == "naive":
        return None
    rows = max(1, round(decode.work.rows))
    limits = replace(situation.recipe.limits, max_batch=rows, token_budget=None)
    fuller = replace(
        situation, recipe=replace(situation.recipe, limits=limits), concurrency=float(MORE * rows)
    )
    result = predict(fuller, {"limits.max_batch": MORE * rows})
    title = f"{MORE * rows} requests at once instead of {rows} (tokens/s of all)"
    return Advice(title, {}, "", result)


def flags_of(edit: Mapping[str, Any]) -> str:
    """`--scheme int8 --graphs`."""
    result = []
    for name, value in edit.items():
        if name == "loop":
            result.append(f"--loop {value}")
        elif isinstance(value, bool):
            result.append(flag(name) if value else flag(name).replace("--", "--no-", 1))
        else:
            result.append(f"{flag(name)} {value}")
    return " ".join(result)
