"""The fields of a config: what each means, what it may hold, and how it looks in a JSON file.

A config is a frozen dataclass whose fields carry `field_help(…)` as metadata. Types and ranges are
checked when it is made, command-line flags are read from the same metadata, and a JSON object is
turned into one, with an error for anything that does not belong there.

    @dataclass(frozen=True)
    class Limits:
        max_batch: int = field(default=256, metadata=field_help("requests at once", minimum=1))

        def __post_init__(self) -> None:
            check_fields(self)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import Field, fields, is_dataclass
from functools import cache
from types import MappingProxyType, NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from ridgeline.errors import UsageError, near_matches
from ridgeline.formats.files import reject_unknown_keys

WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}


def field_help(
    meaning: str,
    *,
    flag: str | None = None,
    minimum: float | None = None,
    maximum: float | None = None,
    aliases: tuple[str, ...] = (),
    several: bool = False,
) -> dict[str, Any]:
    """A field's metadata: its meaning and its allowed range. `flag` is its name for users where the
    field's own would be unclear: `kv-dtype` for the `dtype` of a KV; `aliases` are older names.
    `several`: a tuple whose values may stand behind one flag, `--names a b`.
    """
    return {
        "help": meaning,
        "flag": flag,
        "minimum": minimum,
        "maximum": maximum,
        "aliases": aliases,
        "several": several,
    }


def flag_of(entry: Field[Any]) -> str:
    """A field's name on the command line, without the dashes before it."""
    flag: str = entry.metadata.get("flag") or entry.name.replace("_", "-")
    return flag


def check_fields(config: Any) -> None:
    """Raise UsageError for the first field whose value has the wrong type or is out of range."""
    for entry in fields(config):
        hint, value = hints(type(config))[entry.name], getattr(config, entry.name)
        if not _is_allowed(value, hint, entry.metadata):
            name = flag_of(entry).replace("-", "_")
            close = near_matches(value, _choices(hint)) if isinstance(value, str) else ""
            raise UsageError(f"{name} is {value!r}; give {_allowed(hint, entry.metadata)}{close}")


def config_from(config: type[Any], values: Any, origin: str) -> Any:
    """A config from a JSON object, the configs it holds included. Fields left out keep their
    defaults; `origin` names the file in errors.
    """
    if not isinstance(values, Mapping):
        raise UsageError(f"{origin} is {str(values)[:60]!r}; expected an object with fields")
    known = hints(config)
    reject_unknown_keys(values, known, origin)
    arguments = {
        name: config_from(known[name], value, f"{origin}: {name}")
        if is_dataclass(known[name])
        else value
        for name, value in values.items()
    }
    try:
        return config(**arguments)
    except UsageError as error:
        raise UsageError(f"{origin}: {error}") from error


def dotted_fields(config: type[Any]) -> dict[str, Field[Any]]:
    """Every field by its dotted name, those of the configs it holds included: `kv.dtype`."""
    entries: dict[str, Field[Any]] = {}
    for entry in fields(config):
        part: Any = hints(config)[entry.name]
        if is_dataclass(part):
            inner: Any = part
            entries |= {f"{entry.name}.{own}": value for own, value in dotted_fields(inner).items()}
        else:
            entries[entry.name] = entry
    return entries


def hints(config: type[Any]) -> Mapping[str, Any]:
    """The types of a config's fields."""
    return _hints(config)  # type: ignore[arg-type]


@cache
def _hints(config: Any) -> Mapping[str, Any]:
    """Reading them takes half a millisecond, and configs are made by the hundred while plans are
    compared.
    """
    return MappingProxyType(get_type_hints(config))


def _is_allowed(value: Any, hint: Any, metadata: Mapping[str, Any]) -> bool:
    if value is None:
        return NoneType in get_args(hint)
    low, high = metadata.get("minimum"), metadata.get("maximum")
    return _fits(value, hint) and (low is None or value >= low) and (high is None or value <= high)


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value has a field's type. True and False are not numbers; 1 counts as 1.0."""
    if _choices(hint):
        return value in _choices(hint)
    kinds = _kinds(hint)
    if isinstance(value, bool):
        return bool in kinds
    return isinstance(value, kinds) or (isinstance(value, int) and float in kinds)


def _allowed(hint: Any, metadata: Mapping[str, Any]) -> str:
    """What a field takes, in words: `a whole number from 1 to 512`."""
    if _choices(hint):
        return "one of " + ", ".join(_choices(hint))
    word = WORDS.get(_kinds(hint)[0], f"a {_kinds(hint)[0].__name__}")
    low, high = metadata.get("minimum"), metadata.get("maximum")
    if low is None:
        return word
    return f"{word} of at least {low}" if high is None else f"{word} from {low} to {high}"


def _choices(hint: Any) -> tuple[str, ...]:
    return get_args(hint) if get_origin(hint) is Literal else ()


def _kinds(hint: Any) -> tuple[type, ...]:
    """The types a value may have, None aside; a tuple's entries are not checked."""
    if get_origin(hint) is tuple:
        return (tuple,)
    return tuple(kind for kind in get_args(hint) or (hint,) if kind is not NoneType)
