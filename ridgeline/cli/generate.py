"""`ridgeline generate`: text on stdout as it comes, then on stderr how fast it was and how fast it
could be.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from textwrap import wrap
from typing import Any

import torch
from rich.console import Console

from ridgeline.cli.arguments.options import add_flags, add_model, from_flags
from ridgeline.cli.arguments.parser import group
from ridgeline.cli.terminal import Terminal
from ridgeline.data import Tokenizer
from ridgeline.engine import Engine, Output, Sampling
from ridgeline.engine.execution.work import matrix_dtype
from ridgeline.engine.loading.saved import generation_of, saved_recipe
from ridgeline.engine.naive import check_memory, check_prompt
from ridgeline.errors import UsageError
from ridgeline.formats.dtypes import dtype_bytes, parse_dtype
from ridgeline.hardware import Hardware, detect
from ridgeline.hardware.units import human_bytes, over_words
from ridgeline.kernels.ceilings import measure
from ridgeline.models.checkpoint import open_checkpoint, resolve_model
from ridgeline.models.cost import Chunk, StepCost, step_cost
from ridgeline.models.families import describe
from ridgeline.profiling import step_limit
from ridgeline.quantization.choose import in_words
from ridgeline.quantization.head import HEAD
from ridgeline.quantization.linear import schemes_of
from ridgeline.quantization.load import pick_dtype
from ridgeline.quantization.scheme import Scheme, parse_scheme
from ridgeline.quantization.sizes import expert_bytes, read_bytes_per_weight
from ridgeline.recipe import Recipe

EXAMPLE = """\
ridgeline generate demo "Why is the sky blue?"
ridgeline generate model.gguf --raw - < prompt.txt"""
LINE_WIDTH = 80
MAIN_FLAGS = (
    "--device", "--system", "--raw", "--max-tokens", "--temperature", "--top-p", "--seed", "--stop",
    "--dtype", "--scheme", "--kv-dtype", "--max-context", "--speculation",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument("prompt", metavar="PROMPT", help="the prompt; `-` reads it from stdin")
    prompt = group(parser, "prompt")
    prompt.add_argument("--system", metavar="TEXT", help="system message")
    prompt.add_argument(
        "--raw", action="store_true", help="continue the prompt as it is, without a chat template"
    )
    add_flags(parser, Sampling)
    group(parser, "sampling").add_argument(
        "--generation-config",
        choices=("model", "none"),
        default="model",
        help="`model` takes what no flag gives from the model's generation_config.json, `none` "
        "from the defaults above (default: %(default)s)",
    )
    add_flags(parser, Recipe)


def run(args: argparse.Namespace, terminal: Terminal) -> dict[str, Any]:
    from_flags(args, Sampling)  # what is wrong with the flags is said first
    text = read_stdin() if args.prompt == "-" else args.prompt
    if not text.strip() and not (args.raw and text):
        raise UsageError("the prompt is empty; give some text")
    with terminal.progress() as progress:
        hardware = detect(args.device)
        path = resolve_model(args.model, progress=progress)
        config = describe(open_checkpoint(path)).config  # what is no model, is said first
        tokenizer = Tokenizer.load(path)
        defaults = {} if args.generation_config == "none" else generation_of(path).sampling
        sampling = from_flags(args, Sampling, Sampling(**defaults))
        prompt = prompt_ids(tokenizer, text, args)
        room = check_prompt(config, prompt)
        num_tokens = len(prompt) + min(room, sampling.max_tokens)
        recipe = for_one(from_flags(args, Recipe, saved_recipe(path)), num_tokens)
        dtype = pick_dtype(recipe.dtype, config, hardware, scheme_of(recipe))
        check_memory(config, torch.empty(0, dtype=dtype, device=hardware.device), num_tokens)
        engine = Engine(
            path,
            recipe,
            tokenizer=tokenizer,
            device=args.device,
            num_pages=-(-num_tokens // recipe.kv.page_size),
            progress=progress,
        )
        ceilings = {"read_bandwidth", f"matrix_{matrix_dtype(engine.model, engine.recipe)}"}
        hardware = measure(hardware, ceilings, progress)
    on_text = None if terminal.json else write_out
    with engine:
        output = answer(engine, prompt, sampling, on_text)
        return {**document(args.model, engine, output, hardware), "sampling": dict(defaults)}


def for_one(recipe: Recipe, num_tokens: int) -> Recipe:
    """One request of so many tokens, where the flags or the saved recipe do not say otherwise."""
    limits = recipe.limits
    changes = {"max_batch": limits.max_batch or 1, "max_context": limits.max_context or num_tokens}
    return replace(recipe, limits=replace(limits, **changes))


def answer(
    engine: Engine, prompt: list[int], sampling: Sampling, on_text: Callable[[str], None] | None
) -> Output:
    request_id = engine.add(prompt, sampling)
    try:
        while True:
            for event in engine.step():
                if isinstance(event, Output):
                    event.raise_unless_finished()
                    return event
                if on_text is not None:
                    on_text(event.text)
    finally:
        engine.cancel(request_id)


def scheme_of(recipe: Recipe) -> Scheme | None:
    return None if recipe.scheme is None else parse_scheme(recipe.scheme)


def read_stdin() -> str:
    if sys.stdin is None:
        raise UsageError("the prompt is `-` and stdin is closed; pipe some text into it")
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise UsageError(f"the prompt on stdin is not UTF-8 text: {error}") from error


def prompt_ids(tokenizer: Tokenizer, text: str, args: argparse.Namespace) -> list[int]:
    if args.raw or tokenizer.chat_template is None:
        if args.system is not None:
            why = "with --raw" if args.raw else "for a model without a chat template"
            raise UsageError(f"--system does not work {why}; put it into the prompt")
        return tokenizer.encode(text)
    system = [] if args.system is None else [{"role": "system", "content": args.system}]
    return tokenizer.chat([*system, {"role": "user", "content": text}])


def write_out(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def document(name: str, engine: Engine, output: Output, hardware: Hardware) -> dict[str, Any]:
    """The result with the limits of its two phases: the whole prompt, and a decode step in the
    middle.
    """
    config, dtype = engine.model.config, engine.recipe.dtype
    schemes = schemes_of(engine.model)
    head = schemes.pop(HEAD, None)
    names = sorted({scheme.name for scheme in schemes.values()})
    sizes: dict[str, Any] = {
        "weight_bytes": read_bytes_per_weight(engine.model),
        "kv_bytes": dtype_bytes(parse_dtype(engine.recipe.kv.dtype)),
    }
    prompt, new = output.num_prompt_tokens, len(output.tokens)
    assert output.first_token_s is not None, "it has finished"
    prefill_s, decode_s = output.first_token_s, output.total_s - output.first_token_s
    prefill = step_cost(config, [Chunk(prompt, 0)], **sizes)
    decode = step_cost(config, [Chunk(1, prompt + (new - 1) // 2)], **sizes)
    per_token = decode_s / (new - 1) if new > 1 else None
    return {
        "model": name,
        "device": hardware.name,
        "dtype": dtype,
        "scheme": ", ".join(names) or None,
        "head": "plain" if head is None else head.name,
        "weight_bytes": sum(value.nbytes for value in engine.model.parameters()),
        "plain_expert_bytes": expert_bytes(config, parse_dtype(dtype)) if schemes else 0,
        "plain_for_speed": in_words(engine.choices, dtype),
        "text": output.text,
        "tokens": list(output.tokens),
        "finish_reason": output.finish_reason,
        "num_prompt_tokens": prompt,
        "seed": output.seed,
        "prefill_s": prefill_s,
        "decode_s": decode_s,
        "decode_tokens_per_s": None if per_token is None else 1 / per_token,
        "prefill_limit": limit_json(prefill, engine, hardware, prefill_s),
        "decode_limit": limit_json(decode, engine, hardware, per_token),
    }


def limit_json(
    cost: StepCost, engine: Engine, hardware: Hardware, took_s: float | None
) -> dict[str, Any] | None:
    """`cost` is one rank's."""
    limit = step_limit(cost, hardware, matrix_dtype(engine.model, engine.recipe))
    if limit is None:
        return None
    seconds = limit.seconds * engine.ranks_a_device
    return {
        "seconds": seconds,
        "bound": limit.bound,
        "bytes": cost.bytes * engine.ranks_a_device,
        "ceiling": limit.ceiling.to_json(),
        "share": seconds / took_s if took_s else None,
    }


def render(result: dict[str, Any], console: Console) -> None:
    """The text is out already; what is left is about speed, and stays out of pipes."""
    write_out("" if result["text"].endswith("\n") else "\n")
    errors = Console(stderr=True, highlight=False)
    for line in summary_lines(result):
        errors.print(line, style="dim", markup=False, soft_wrap=True)


def summary_lines(result: dict[str, Any]) -> list[str]:
    """`decode 80 tokens, 31.2 tok/s: 78% of the limit, 40 tok/s (memory, measured)`, …"""
    prefill = f"prefill {result['num_prompt_tokens']} tokens, {result['prefill_s']:.3g} s"
    lines = [prefill + share_of(result["prefill_limit"], "s")]
    rate = result["decode_tokens_per_s"]
    if rate is not None:
        decode = f"decode {len(result['tokens'])} tokens, {rate:.1f} tok/s"
        lines.append(decode + share_of(result["decode_limit"], "tok/s"))
    ended = {"stop": "ended by the model", "length": "ended at --max-tokens or the context limit"}
    stored = f"{result['scheme']}, " if result["scheme"] else ""
    stored += f"head {result['head']}, " if result["head"] != "plain" else ""
    setup = f"{stored}{result['dtype']} on {result['device']}"
    if result["plain_expert_bytes"]:
        lines.append(plain_experts(result))
    if result["plain_for_speed"]:
        lines.append(result["plain_for_speed"])
    limits = {phase: result[f"{phase}_limit"] for phase in ("prefill", "decode")}
    over = over_words({phase: limit and limit["share"] for phase, limit in limits.items()})
    lines += wrap(over, LINE_WIDTH) if over is not None else []
    if result["sampling"]:
        values = " ".join(f"{name}={value:g}" for name, value in result["sampling"].items())
        lines += wrap(f"the model's defaults: {values}", LINE_WIDTH)
    return [*lines, setup, f"{ended[result['finish_reason']]}, seed {result['seed']}"]


def plain_experts(result: dict[str, Any]) -> str:
    experts, all_weights = (
        human_bytes(result[name]) for name in ("plain_expert_bytes", "weight_bytes")
    )
    return f"experts are not quantized: {experts} of {all_weights} in {result['dtype']}"


def share_of(limit: dict[str, Any] | None, unit: str) -> str:
    if limit is None:
        return ": limit unknown"
    best = limit["seconds"] if unit == "s" else 1 / limit["seconds"]
    source = limit["ceiling"]["source"]
    return f": {limit['share']:.0%} of the limit, {best:.3g} {unit} ({limit['bound']}, {source})"
