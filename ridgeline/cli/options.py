"""Command-line flags from a config's fields, so that a flag's name, default and help exist once.

A field's help is in its metadata (formats/fields.py `about`). Tuples may be given several times, a
yes-or-no is `--graphs` or `--no-graphs`, and the configs that a config holds bring their own flags.

    add_flags(parser, Recipe)
    recipe = from_flags(args, Recipe, base=Recipe.load(folder))
    given_flags(args, Recipe)           # ["--dtype=bf16", "--no-graphs"], for another process
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import Field, fields, is_dataclass, replace
from types import NoneType
from typing import Any, Literal, TypeVar, get_args, get_origin

from ridgeline.formats.fields import flag_of, hints

Config = TypeVar("Config")


def add_model(parser: argparse.ArgumentParser) -> None:
    """A model, or a shape with random weights: `models.shapes.check_one` says if it is not one."""
    parser.add_argument(
        "model", nargs="?", help="Hugging Face folder or hub name, GGUF file, or `demo`"
    )
    parser.add_argument(
        "--shape", metavar="NAME", help="a model of this shape with random weights instead"
    )


def add_flags(parser: argparse.ArgumentParser, config: type[Any]) -> None:
    group = parser.add_argument_group(config.__name__.lower().removesuffix("config"))
    types = hints(config)
    for entry in _flag_fields(config):
        if is_dataclass(types[entry.name]):
            add_flags(parser, types[entry.name])
        else:
            _add_flag(group, entry, types[entry.name])


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


def _add_flag(group: argparse._ArgumentGroup, entry: Field[Any], hint: Any) -> None:
    kind, is_tuple = _plain_type(hint)
    default = "" if entry.default in (None, ()) else f" (default: {_shown(entry.default)})"
    about: dict[str, Any] = {"dest": _dest(entry), "help": entry.metadata["help"] + default}
    if kind is bool:
        about |= {"action": argparse.BooleanOptionalAction}
    else:
        about |= {"type": _parser_for(kind), "action": "append" if is_tuple else "store"}
        about |= {"metavar": _metavar(kind, hint)}
    group.add_argument("--" + flag_of(entry), default=None, **about)


def _shown(default: Any) -> str:
    return {True: "yes", False: "no"}[default] if isinstance(default, bool) else str(default)


def _dest(entry: Field[Any]) -> str:
    return flag_of(entry).replace("-", "_")


def _metavar(kind: type, hint: Any) -> str:
    """`INT`, or the words a field takes: `{auto,bf16}`. Wrong ones are the config's to refuse."""
    if get_origin(hint) is Literal:
        return "{" + ",".join(get_args(hint)) + "}"
    return kind.__name__.upper()


def _value(args: argparse.Namespace, entry: Field[Any]) -> Any:
    value = getattr(args, _dest(entry))
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
