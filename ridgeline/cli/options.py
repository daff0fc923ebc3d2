"""Command-line flags from a config's fields, so that a flag's name, default and help exist once.

A field's help is in its metadata, `field(default=0.0, metadata={"help": "…"})`; tuples may be
given several times.

    add_flags(parser, Sampling)
    sampling = from_flags(args, Sampling)
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import Field, fields
from types import NoneType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

Config = TypeVar("Config")


def add_flags(parser: argparse.ArgumentParser, config: type[Any]) -> None:
    group = parser.add_argument_group(config.__name__.lower())
    hints = get_type_hints(config)
    for field in _flag_fields(config):
        kind, is_tuple = _plain_type(hints[field.name])
        flag = "--" + field.name.replace("_", "-")
        default = "" if field.default in (None, ()) else f" (default: {field.default})"
        group.add_argument(
            flag,
            dest=field.name,
            type=_parser_for(kind),
            action="append" if is_tuple else "store",
            default=None,
            metavar=kind.__name__.upper(),
            help=field.metadata["help"] + default,
        )


def from_flags(args: argparse.Namespace, config: type[Config]) -> Config:
    """A config of the flags that were given; the others keep the config's own defaults."""
    given = {field.name: _value(args, field) for field in _flag_fields(config)}
    return config(**{name: value for name, value in given.items() if value is not None})


def _flag_fields(config: type[Any]) -> list[Field[Any]]:
    """Without those that only Python callers can set."""
    return [field for field in fields(config) if not field.metadata.get("python_only")]


def _value(args: argparse.Namespace, field: Field[Any]) -> Any:
    value = getattr(args, field.name)
    return tuple(value) if isinstance(value, list) else value


def _plain_type(hint: Any) -> tuple[type, bool]:
    """`int | None` -> (int, False); `tuple[str, ...]` -> (str, True)."""
    if get_origin(hint) is tuple:
        return get_args(hint)[0], True
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
