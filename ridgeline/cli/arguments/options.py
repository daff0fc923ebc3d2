"""Command-line flags from a config's fields, so that a flag's name, default and help exist once.

A field's help is in its metadata (formats/fields.py `about`). Tuples may be given several times, a
yes-or-no is `--graphs` or `--no-graphs`, and the configs that a config holds bring their own flags.

    add_flags(parser, Recipe)
    recipe = from_flags(args, Recipe, base=Recipe.load(folder))
    given_flags(args, Recipe)           # ["--dtype=bf16", "--no-graphs"], for another process
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Collection
from dataclasses import Field, fields, is_dataclass, replace
from pathlib import Path
from types import NoneType
from typing import Any, Literal, TypeVar, get_args, get_origin

from ridgeline.cli.arguments.parser import group
from ridgeline.data.text_files import read_text
from ridgeline.data.workload import MIXES
from ridgeline.errors import UsageError
from ridgeline.formats.fields import dotted_fields, flag_of, hints

Config = TypeVar("Config")

TITLES = {  # of the groups in --help
    "Recipe": "execution",
    "KV": "KV cache",
    "Parallel": "parallelism",
    "ServerConfig": "server",
    "QualityBounds": "quality",
    "TrainConfig": "training",
    "DataOptions": "data",
    "BatchOptions": "batch",
    "OptimizerOptions": "optimizer",
    "ScheduleOptions": "optimizer",
    "RunLength": "run",
    "EvaluationOptions": "run",
    "CheckpointOptions": "run",
    "LoraOptions": "adapters",
    "RecoveryOptions": "recovery",
    "QatOptions": "rounding and distillation",
    "DistillOptions": "rounding and distillation",
    "StartOptions": "devices",
    "ReadOptions": "documents",
    "CleanOptions": "cleaning",
    "QualityOptions": "quality",
    "LanguageOptions": "language",
    "PiiOptions": "personal data",
    "DuplicateOptions": "duplicates",
    "DecontaminationOptions": "evaluation sets",
    "TokenOptions": "tokens",
}
LONGEST_METAVAR = 60  # letters; the words a field takes are part of its help then
METAVARS = {"scheme": "NAME", "served_model_name": "NAME", "draft_model": "MODEL",
            "host": "ADDRESS", "api_key": "KEY", "api_key_file": "FILE", "admin_key": "KEY",
            "allow_origin": "ORIGIN", "root_path": "PATH", "tls_cert": "FILE",
            "tls_key": "FILE", "path": "PATH", "tokenizer": "MODEL", "targets": "NAMES",
            "sparsity": "WHAT", "teacher": "MODEL"}  # fmt: skip
MODEL_HELP = "Hugging Face folder or hub name, GGUF file, or `demo`"
DEVICE_HELP = "cpu, cuda or cuda:N (default: the GPU if there is one)"
OUTPUT_TOKENS = 256  # per prompt of a prompt file, where none are named


def add_model(parser: argparse.ArgumentParser, or_shape: bool = False) -> None:
    """MODEL and --device. With `or_shape` also --shape, a model with random weights instead of
    MODEL: `models.shapes.check_one` checks that one of the two is given.
    """
    model = group(parser, "model")
    if or_shape:
        parser.add_argument("model", metavar="MODEL", nargs="?", help=MODEL_HELP)
        model.add_argument(
            "--shape", metavar="NAME", help="instead of MODEL: this shape with random weights"
        )
    else:
        parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    model.add_argument("--device", default="auto", metavar="DEVICE", help=DEVICE_HELP)


def add_recipe(parser: argparse.ArgumentParser) -> None:
    group(parser, "model").add_argument(
        "--recipe",
        type=Path,
        metavar="FILE",
        help="use this recipe.json, or the one in a plan, not the model's own",
    )


def add_workload(
    parser: argparse.ArgumentParser, default: str | None = None, meaning: str = "%(default)s"
) -> argparse._ArgumentGroup:
    """--workload and --output-tokens; `meaning` says what is used where none is named."""
    workload = group(parser, "workload")
    workload.add_argument(
        "--workload",
        default=default,
        metavar="NAME",
        help=f"{', '.join(MIXES)}, or a file: a trace (Azure, BurstGPT, Mooncake) or prompts "
        f"(default: {meaning})",
    )
    workload.add_argument(
        "--output-tokens",
        type=int,
        default=OUTPUT_TOKENS,
        metavar="N",
        help="tokens to generate per prompt of a prompt file (default: %(default)s)",
    )
    return workload


def add_latency_bounds(owner: argparse._ArgumentGroup, meaning: str) -> None:
    for flag, what in (("ttft", "time to first token"), ("tpot", "time per output token")):
        owner.add_argument(
            f"--{flag}-ms", type=float, metavar="MS", help=f"bound on {what}, in ms{meaning}"
        )


def first_key(path: Path | None, flag: str) -> str | None:
    """An API key from a file or the environment: a flag would stand in records and in lists of
    processes. The file may be the server's own, with comments, and options behind each key.
    """
    if path is None:
        return os.environ.get("OPENAI_API_KEY") or None
    lines = [line.split() for line in read_text(path).splitlines()]
    keys = [words[0] for words in lines if words and not words[0].startswith("#")]
    if not keys:
        raise UsageError(f"{flag} {path} has no key; write one on a line")
    return keys[0]


def add_save(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """--save, in the group of what is written."""
    output = group(parser, "output")
    output.add_argument(
        "--save", type=Path, metavar="DIR", help="also write a JSON record into DIR"
    )
    return output


def add_flags(parser: argparse.ArgumentParser, config: type[Any]) -> None:
    own = group(parser, TITLES.get(config.__name__, config.__name__.lower()))
    types = hints(config)
    for entry in _flag_fields(config):
        if is_dataclass(types[entry.name]):
            add_flags(parser, types[entry.name])
        else:
            _add_flag(own, entry, types[entry.name])


def add_some_flags(
    owner: argparse._ArgumentGroup, config: type[Any], names: Collection[str]
) -> None:
    """Of the fields with these dotted names alone."""
    entries = dotted_fields(config)
    for name in names:
        _add_flag(owner, entries[name], _hint(config, name))


def dest_of(config: type[Any], name: str) -> str:
    """Where the flag of a dotted field is found in the parsed arguments."""
    return _dest(dotted_fields(config)[name])


def _hint(config: type[Any], name: str) -> Any:
    first, _, rest = name.partition(".")
    hint = hints(config)[first]
    return _hint(hint, rest) if rest else hint


def from_flags(
    args: argparse.Namespace, config: type[Config], base: Config | None = None
) -> Config:
    """A config of the flags that were given; the others are those of `base`, or the config's own
    defaults.
    """
    known: Any = config() if base is None else base
    given: dict[str, Any] = {}
    for entry in _flag_fields(config):
        part = getattr(known, entry.name)
        value = from_flags(args, type(part), part) if is_dataclass(part) else _value(args, entry)
        if value is not None:
            given[entry.name] = value
    made: Config = replace(known, **given)
    return made


def given_flags(args: argparse.Namespace, config: type[Any]) -> list[str]:
    """The flags that were given, as words of a command line that gives the same ones."""
    types = hints(config)
    words: list[str] = []
    for entry in _flag_fields(config):
        if is_dataclass(types[entry.name]):
            words += given_flags(args, types[entry.name])
        else:
            words += flag_words(flag_of(entry), getattr(args, _dest(entry)))
    return words


def flag_words(name: str, value: Any) -> list[str]:
    """`--name=value`, as often as there are values; none for None."""
    if value is None:
        return []
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    values = value if isinstance(value, list) else [value]
    return [f"--{name}={each}" for each in values]


def _flag_fields(config: type[Any]) -> list[Field[Any]]:
    """Without those that only Python callers can set."""
    return [entry for entry in fields(config) if not entry.metadata.get("python_only")]


def _add_flag(owner: argparse._ArgumentGroup, entry: Field[Any], hint: Any) -> None:
    kind, is_tuple = _plain_type(hint)
    meaning = entry.metadata["help"]
    if entry.default not in (None, (), "") and "(auto:" not in meaning:
        meaning += f" (default: {_shown(entry.default)})"
    metavar = _metavar(entry.name, kind, hint)
    if len(metavar) > LONGEST_METAVAR:
        meaning, metavar = f"{', '.join(get_args(hint))}: {meaning}", "NAME"
    options: dict[str, Any] = {"dest": _dest(entry), "help": meaning}
    if kind is bool:
        options |= {"action": argparse.BooleanOptionalAction}
    else:
        options |= {"type": _parser_for(kind), "action": "append" if is_tuple else "store"}
        options |= {"metavar": metavar}
    if entry.metadata.get("several"):
        options |= {"action": "extend", "nargs": "+"}
    names = [f"--{name}" for name in (flag_of(entry), *entry.metadata.get("aliases", ()))]
    owner.add_argument(*names, default=None, **options)


def _shown(default: Any) -> str:
    if isinstance(default, bool):
        return "yes" if default else "no"
    if isinstance(default, tuple):
        return " ".join(map(str, default))
    return f"{default:g}" if isinstance(default, float) else str(default)


def _dest(entry: Field[Any]) -> str:
    return flag_of(entry).replace("-", "_")


def _metavar(name: str, kind: type, hint: Any) -> str:
    """`N`, or the words a field takes: `{auto,bf16}`. Wrong ones are the config's to refuse."""
    if get_origin(hint) is Literal:
        return "{" + ",".join(get_args(hint)) + "}"
    return METAVARS.get(name) or {int: "N", float: "X"}.get(kind, "TEXT")


def _value(args: argparse.Namespace, entry: Field[Any]) -> Any:
    value = getattr(args, _dest(entry), None)  # not every command has all flags of a config
    return tuple(value) if isinstance(value, list) else value


def _plain_type(hint: Any) -> tuple[type, bool]:
    """`int | None` -> (int, False); `tuple[str, ...]` -> (str, True); words -> (str, False)."""
    if get_origin(hint) is tuple:
        return get_args(hint)[0], True
    if get_origin(hint) is Literal:
        return str, False
    options = [option for option in get_args(hint) if option is not NoneType]
    return (options[0] if options else hint), False


def _parser_for(kind: type) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        try:
            return kind(text)
        except ValueError:
            what = {"int": "a whole number", "float": "a number"}.get(kind.__name__, kind.__name__)
            raise argparse.ArgumentTypeError(f"{text!r} is not {what}") from None

    return parse
