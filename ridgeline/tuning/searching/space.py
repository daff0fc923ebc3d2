"""What a search may choose: names with a range or with values, and where a choice lies in the unit
cube, in which the surrogate measures distances.

A range whose ends are both above zero is logarithmic: learning rates, batches and widths differ by
ratios. One that begins at zero is even.

    space = SearchSpace((("lr", Between(1e-5, 1e-3)), ("batch", OneOf((4, 8, 16)))))
    point = space.at([0.5, 0.0])            # {"lr": 1e-4, "batch": 4}
    space.place(point)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from ridgeline.errors import UsageError, near_matches
from ridgeline.formats.fields import hints

Setting = float | int | str | bool
Point = dict[str, Setting]
DIGITS = 4  # of a value from a range: what is beyond changes no run


@dataclass(frozen=True)
class Between:
    """Every value from `low` to `high`."""

    low: float
    high: float
    is_whole: bool = False

    def __post_init__(self) -> None:
        if not (math.isfinite(self.low) and math.isfinite(self.high) and 0 <= self.low < self.high):
            raise UsageError(
                f"a range goes from {self.low:g} to {self.high:g}; give two numbers from zero on, "
                "the smaller one first"
            )

    @property
    def is_log(self) -> bool:
        return self.low > 0

    @property
    def size(self) -> int:
        """Of its part of the cube."""
        return 1

    def at(self, place: Sequence[float]) -> Setting:
        share = min(1.0, max(0.0, place[0]))
        if self.is_log:
            value = self.low * (self.high / self.low) ** share
        else:
            value = self.low + (self.high - self.low) * share
        if self.is_whole:
            return round(value)
        return min(self.high, max(self.low, float(f"{value:.{DIGITS}g}")))

    def place(self, value: Setting) -> list[float]:
        assert isinstance(value, int | float), value
        if self.is_log:
            return [math.log(value / self.low) / math.log(self.high / self.low)]
        return [(value - self.low) / (self.high - self.low)]

    def holds(self, value: object) -> bool:
        return isinstance(value, int | float) and self.low <= value <= self.high

    def some(self, count: int) -> list[Setting]:
        """Values from the lowest to the highest."""
        return list(dict.fromkeys(self.at([step / (count - 1)]) for step in range(count)))

    def to_json(self) -> dict[str, Any]:
        return {"low": self.low, "high": self.high, "whole": self.is_whole}


@dataclass(frozen=True)
class OneOf:
    """One of these. Numbers have an order and distances; words have neither."""

    values: tuple[Setting, ...]

    def __post_init__(self) -> None:
        if not self.values:
            raise UsageError("there is nothing to choose from; give at least one value")
        if len(set(self.values)) < len(self.values):
            raise UsageError(f"a value stands twice in {self.values}")

    @cached_property
    def is_ordered(self) -> bool:
        return all(type(value) in (int, float) for value in self.values)

    @property
    def size(self) -> int:
        return 1 if self.is_ordered else len(self.values)

    def at(self, place: Sequence[float]) -> Setting:
        if not self.is_ordered:
            return self.values[max(range(len(place)), key=place.__getitem__)]
        places = self._places
        return self.values[min(range(len(places)), key=lambda index: abs(places[index] - place[0]))]

    def place(self, value: Setting) -> list[float]:
        index = self.values.index(value)
        if self.is_ordered:
            return [self._places[index]]
        return [float(index == number) for number in range(len(self.values))]

    @cached_property
    def _places(self) -> list[float]:
        """From 0 to 1; by ratios where all are above zero."""
        numbers = [float(value) for value in self.values]
        if min(numbers) > 0:
            numbers = [math.log(number) for number in numbers]
        low, span = min(numbers), max(numbers) - min(numbers)
        return [(number - low) / span if span else 0.0 for number in numbers]

    def holds(self, value: object) -> bool:
        return value in self.values

    def some(self, count: int) -> list[Setting]:
        return list(self.values)

    def to_json(self) -> dict[str, Any]:
        return {"values": list(self.values)}


Choices = Between | OneOf


@dataclass(frozen=True)
class SearchSpace:
    entries: tuple[tuple[str, Choices], ...]

    def __post_init__(self) -> None:
        if not self.entries:
            raise UsageError(
                "there is nothing to search; give --over NAME=VALUES, such as --over lr=1e-5..1e-3"
            )
        names = [name for name, _ in self.entries]
        for name in names:
            if names.count(name) > 1:
                raise UsageError(f"{name} is to be searched twice; give --over {name}=… once")

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.entries]

    @property
    def size(self) -> int:
        """Of the cube."""
        return sum(choices.size for _, choices in self.entries)

    @property
    def num_points(self) -> int | None:
        """None where a range has no end of values."""
        count = 1
        for _, choices in self.entries:
            if isinstance(choices, Between):
                return None
            count *= len(choices.values)
        return count

    def at(self, place: Sequence[float]) -> Point:
        point, first = Point(), 0
        for name, choices in self.entries:
            point[name] = choices.at(place[first : first + choices.size])
            first += choices.size
        return point

    def place(self, point: Mapping[str, Setting]) -> list[float]:
        return [each for name, choices in self.entries for each in choices.place(point[name])]

    def holds(self, point: Mapping[str, object]) -> bool:
        return all(name in point and choices.holds(point[name]) for name, choices in self.entries)

    def to_json(self) -> dict[str, Any]:
        return {name: choices.to_json() for name, choices in self.entries}


def field_kind(config: type[Any], name: str) -> type:
    """What the field with this dotted name takes: float for `optimizer.lr`; str for words."""
    hint: Any = config
    for part in name.split("."):
        hint = hints(hint)[part]
    if get_origin(hint) is Literal:
        return str
    kinds = [kind for kind in get_args(hint) or (hint,) if kind is not NoneType]
    kind: type = kinds[0]
    return kind


def parse_choices(name: str, text: str, kind: type) -> Choices:
    """`1e-5..1e-3`, or values with commas; `kind` is what the field takes."""
    low, dots, high = text.partition("..")
    if dots:
        if kind not in (int, float):
            raise UsageError(f"--over {name}={text}: {name} is no number; give values with commas")
        ends = [_value(name, text, end, kind) for end in (low, high)]
        try:
            return Between(float(ends[0]), float(ends[1]), kind is int)
        except UsageError as error:
            raise UsageError(f"--over {name}={text}: {error}") from None
    values = tuple(_value(name, text, word, kind) for word in text.split(",") if word.strip())
    try:
        return OneOf(values)
    except UsageError as error:
        raise UsageError(f"--over {name}={text}: {error}") from None


def _value(name: str, text: str, word: str, kind: type) -> Setting:
    word = word.strip()
    if kind is bool:
        words = {"yes": True, "no": False}
        if word not in words:
            raise UsageError(
                f"--over {name}={text}: {word!r} is not yes or no{near_matches(word, words)}"
            )
        return words[word]
    try:
        value: Setting = kind(word)
    except ValueError:
        what = {"int": "a whole number", "float": "a number"}.get(kind.__name__, kind.__name__)
        raise UsageError(f"--over {name}={text}: {word!r} is not {what}") from None
    return value
