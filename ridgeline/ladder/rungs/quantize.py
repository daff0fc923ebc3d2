"""Quantize: weights in 8 or 4 bits, what they are multiplied with in 8, the head in 8, keys and
values in 8; and weights in 16 bits beside their codes. Schemes exclude each other; each is measured
against the best so far, the largest predicted gain first, by the chance that its answers are good
enough.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from ridgeline.engine.memory.footprint import copied_bytes
from ridgeline.errors import UnsupportedError
from ridgeline.hardware.probes import fp8_dtype
from ridgeline.ladder.rungs.base import Offer, Rung, RungContext
from ridgeline.quantization.devices import check_runs
from ridgeline.quantization.scheme import Scheme, parse_scheme
from ridgeline.quantization.sizes import head_matrix, model_matrices

WEIGHTS = {
    "int8": "weights in int8",
    "fp8": "weights and activations in fp8",
    "w8a8-int8": "weights and activations in int8",
    "int4-g128": "weights in int4, groups of 128",
    "int4-g64": "weights in int4, groups of 64",
    "int4-g32": "weights in int4, groups of 32",
}
INT4 = ("int4-g128", "int4-g64", "int4-g32")  # finer and finer groups: more bytes, less error
FINER_GAIN = 4.0  # at most, that finer groups take off the error
# `demo` is refused in it (a KL of 0.44 where 0.02 is allowed); of others it is not known before.
# So 8 bits come first, unless 4 give more than twice as much on top.
INT4_CHANCE = 0.5
COPIES_ROOM = 0.25  # of the memory, that copies of weights may take where they are measured


def weights(name: str, context: RungContext) -> Offer | str:
    scheme = parse_scheme(name)
    if context.facts.is_quantized:
        return "the checkpoint is quantized already; climb from the one it was made from"
    if context.state.recipe.scheme == name and context.state.folder is None:
        return "it is on already"
    shapes = list(model_matrices(context.facts.config))
    fitting = sum(scheme.fits(*shape) for shape in shapes)
    if not fitting:
        return f"no matrix of the model has rows that {name} divides"
    problem = _among_groups(context, name) if name in INT4 else None
    if problem is not None:
        return problem
    if context.facts.on_cpu and scheme.weight == "fp8":
        return "a CPU only decodes fp8; int8 is measured"
    try:
        check_runs(scheme, context.filled.dtype, context.facts.hardware.device)
    except UnsupportedError as error:
        return str(error)
    edit: dict[str, Any] = {"scheme": name}
    if context.state.folder is not None:
        edit["folder"] = None
    return Offer(edit, _why(scheme, fitting, len(shapes)))


def _among_groups(context: RungContext, name: str) -> str | None:
    """Why int4 with groups of this size need not be tried beside those of others."""
    number, matrices = INT4.index(name), list(model_matrices(context.facts.config))
    for finer in INT4[number + 1 :]:
        if _outside(context, finer) is not None:
            return f"{finer}, whose groups are finer, was outside the quality bound"
    for coarser in INT4[:number]:
        fits = all(parse_scheme(coarser).fits(*shape) for shape in matrices)
        kl, allowed = _outside(context, coarser), context.facts.bounds.max_kl
        if fits and kl is None:
            return f"{coarser} fits, is smaller, and was not outside the quality bound"
        if kl is not None and allowed is not None and kl > FINER_GAIN * allowed:
            return f"{coarser} was far outside the quality bound"
    return None


def _outside(context: RungContext, name: str) -> float | None:
    """Its mean KL, where it was measured and outside the bound."""
    outcome = context.outcomes.get(name)
    if outcome is None or outcome.quality is None or outcome.quality.problem is None:
        return None
    return outcome.quality.mean_kl


def _why(scheme: Scheme, fitting: int, count: int) -> str:
    some = "all matrices" if fitting == count else f"{fitting} of {count} matrices"
    inputs = "" if scheme.inputs == "16-bit" else f", multiplied with inputs in {scheme.inputs}"
    return f"{some} in {scheme.bits} bits{inputs}: fewer bytes in every step"


def kv(name: str, context: RungContext) -> Offer | str:
    now = context.filled.kv.dtype
    if now in ("fp8", "int8"):
        return f"keys and values are in {now} already"
    if name == "fp8" and (context.facts.on_cpu or fp8_dtype(context.facts.hardware) is None):
        return f"{context.facts.hardware.name} has no fp8; int8 is measured"
    if context.filled.dtype == "fp32" and not context.facts.on_cpu:
        return "on a GPU 8-bit pages go with 16-bit work, and the dtype is fp32"
    return Offer({"kv.dtype": name}, "attention reads half the bytes, and twice the tokens fit")


def head(context: RungContext) -> Offer | str:
    """What schemes leave plain: the fewer bytes the layers have, the more of a step it is."""
    scheme, now = parse_scheme("int8"), context.filled
    if now.head != "plain":
        return f"the head is in {now.head} already"
    if now.deterministic:
        return "deterministic products are of plain weights"
    if not scheme.fits(*head_matrix(context.facts.config)):
        return "the head has rows that int8 does not divide"
    try:
        check_runs(scheme, now.dtype, context.facts.hardware.device)
    except UnsupportedError as error:
        return str(error)
    return Offer({"head": "int8"}, "the matrix that makes logits is read in every step")


def copies(context: RungContext) -> Offer | str:
    """What one token gains by codes, a step of many may lose: they are written out first."""
    now, scheme = context.filled, _scheme(context)
    if context.facts.on_cpu:
        return "a CPU multiplies many rows by codes too"
    if now.copies:
        return "they are held already"
    if context.facts.is_quantized:
        return "of the checkpoint's own codes the engine decides by the room there is"
    if scheme is None or scheme.inputs != "16-bit":
        return "no weights are codes that are multiplied with 16-bit inputs"
    if now.deterministic or now.parallel.num_ranks > 1:
        return "products that are deterministic, or of ranks, are of the codes alone"
    held = replace(now, scheme=scheme.name, copies=True)
    share = copied_bytes(context.facts.config, held) / context.facts.hardware.memory_bytes
    if share > COPIES_ROOM:
        return f"copies of the weights would take {share:.0%} of the memory"
    return Offer({"copies": True}, "steps of many tokens need not write codes out first")


def _scheme(context: RungContext) -> Scheme | None:
    """Of the weights, which calibrated codes have in their checkpoint."""
    name = context.state.recipe.scheme
    if name is None and context.state.folder is not None:
        kept = (o.name for o in context.outcomes.values() if o.status == "kept")
        name = next((each for each in kept if each in WEIGHTS), None)
    return None if name is None else parse_scheme(name)


SCHEMES = tuple(
    Rung(
        name,
        "quantize",
        title,
        partial(weights, name),
        True,
        chance=INT4_CHANCE if name in INT4 else 1.0,
        again_after=("tuned", "batching"),
    )
    for name, title in WEIGHTS.items()
)
PAGES = tuple(
    Rung(
        f"kv-{name}",
        "quantize",
        f"keys and values in {name}",
        partial(kv, name),
        True,
        again_after=("tuned",),
    )
    for name in ("fp8", "int8")
)
HEAD = (
    Rung("head-int8", "quantize", "the head in int8", head, True, again_after=("tuned", *WEIGHTS)),
)
COPIES = (
    Rung(
        "copies",
        "quantize",
        "weights in 16 bits too, for prompts",
        copies,
        again_after=("tuned", "batching", *WEIGHTS),
    ),
)
