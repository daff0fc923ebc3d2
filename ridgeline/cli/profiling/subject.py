"""What `ridgeline profile` runs: a model with an engine or the plain loop around it, at the sizes
that were asked for, and why not.
"""

from __future__ import annotations

import argparse
import re
from dataclasses import replace
from typing import Any, NamedTuple

from ridgeline.cli.arguments.options import from_flags
from ridgeline.cli.bench.engine import prepared
from ridgeline.errors import ContextLengthError, UsageError
from ridgeline.formats.dtypes import dtype_name
from ridgeline.hardware import Hardware
from ridgeline.models.checkpoint import resolve_model
from ridgeline.models.shapes import check_one, describe_shape, random_model
from ridgeline.profiling.tracing.plain_stepping import NaiveSteps
from ridgeline.profiling.tracing.stepping import EngineSteps, ProfiledSteps
from ridgeline.progress import Progress
from ridgeline.quantization import load_model
from ridgeline.quantization.load import choose_dtype
from ridgeline.recipe import Recipe, edited, field_table, flag, with_auto

CONTEXT = 1024  # tokens, where none are named and the model has as many
OF_THE_PLAIN_LOOP = ("dtype",)  # fields of a recipe that it obeys


class PromptSizes(NamedTuple):
    batch: int
    length: int


def check(args: argparse.Namespace) -> None:
    check_one(args.model, args.shape)
    for name in ("batch", "context", "steps"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise UsageError(f"--{name} is {value}; give at least 1")
    if args.context is not None and args.context < 2:
        raise UsageError("--context is 1; give at least 2 (a prompt and the token to decode)")
    if args.prefill is not None:
        parse_prompts(args.prefill)
    if args.loop == "naive":
        check_plain(args)


def check_plain(args: argparse.Namespace) -> None:
    """The plain loop has a dtype; other flags would do nothing."""
    given = from_flags(args, Recipe)
    for name in field_table():
        if name not in OF_THE_PLAIN_LOOP and value_of(given, name) != value_of(Recipe(), name):
            raise UsageError(
                f"{flag(name)} is for the engine; --loop naive takes "
                f"{', '.join(map(flag, OF_THE_PLAIN_LOOP))} alone; remove one of the two"
            )


def value_of(recipe: Recipe, name: str) -> Any:
    value: Any = recipe
    for part in name.split("."):
        value = getattr(value, part)
    return value


def parse_prompts(text: str) -> PromptSizes:
    """`2048`, or `16x2048`."""
    match = re.fullmatch(r"(?:(\d+)x)?(\d+)", text)
    if match is None or not int(match[2]) or match[1] == "0":
        raise UsageError(f"--prefill is {text!r}; give a prompt length, e.g. 2048, or 16x2048")
    return PromptSizes(int(match[1] or 1), int(match[2]))


def subject_of(
    args: argparse.Namespace, hardware: Hardware, progress: Progress, notes: list[str]
) -> ProfiledSteps:
    if args.loop == "naive":
        return plain_subject(args, hardware, progress)

    def without_drafts(recipe: Recipe) -> Recipe:
        if recipe.speculation.method == "none":
            return recipe
        notes.append("profiled without speculation: its cost and gain depend on the text")
        return replace(recipe, speculation=Recipe().speculation)

    return EngineSteps(prepared(args, hardware, progress, without_drafts).engine)


def plain_subject(args: argparse.Namespace, hardware: Hardware, progress: Progress) -> NaiveSteps:
    recipe = from_flags(args, Recipe)
    if args.shape is None:
        path = resolve_model(args.model, progress=progress)
        model = load_model(path, dtype=recipe.dtype, device=args.device, progress=progress)
    else:
        dtype = choose_dtype(recipe.dtype, describe_shape(args.shape).config, hardware)
        model = random_model(args.shape, dtype, hardware.device)
    dtype = model.embed.weight.dtype
    filled = with_auto(recipe, model.config, dtype, hardware.device)
    filled = edited(edited(filled, "dtype", dtype_name(dtype)), "kernels", "reference")
    return NaiveSteps(model, edited(filled, "graphs", False))


def sizes_of(args: argparse.Namespace, subject: ProfiledSteps) -> tuple[int, PromptSizes]:
    """As asked; left open, what fits."""
    longest = subject.recipe.limits.filled().max_context
    context = args.context or min(CONTEXT, max(2, longest // 2))
    if context > longest:
        raise ContextLengthError(
            f"--context is {context}; the model takes {longest} tokens; give at most {longest}"
        )
    if args.prefill is not None:
        return context, parse_prompts(args.prefill)
    return context, PromptSizes(1, min(context, longest - 2))
