"""SearchConfig: what `tune search` looks for, and in what. A named search (configs/tuning.py) is a
function that returns one; `study.json` holds it.

A name of the space is a flag of `ridgeline train`, or `layers`, `width` and `heads` of a shape.

    config = SearchConfig(base, SearchSpace((("lr", Between(1e-5, 1e-3)),)))
    edited(config, {"lr": 3e-4}).optimizer.lr
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from operator import attrgetter
from typing import Any

from ridgeline.errors import UsageError, near_matches
from ridgeline.formats.fields import dotted_fields, flag_of
from ridgeline.models.shapes import describe_shape
from ridgeline.training.config import TrainConfig
from ridgeline.training.config_file import VERSION, parse_config
from ridgeline.tuning.network_shapes import SHAPE_PARTS, Equal, equal_shape
from ridgeline.tuning.searching.halving import Rungs
from ridgeline.tuning.searching.space import (
    Between,
    OneOf,
    Point,
    SearchSpace,
    Setting,
    field_kind,
    parse_choices,
)

USUAL_REACH = 30.0  # times the learning rate, each way, where no space is given
FIXED = ("data", "out", "tokenizer", "steps", "minutes", "tokens", "held-out", "eval-sequences")


@dataclass(frozen=True)
class SearchConfig:
    base: TrainConfig  # a whole run; its own settings are tried first
    space: SearchSpace
    rungs: Rungs = field(default_factory=Rungs)
    seed: int = 0
    equal: Equal = "free"  # what networks of other shapes have in common with the base's

    def __post_init__(self) -> None:
        names = flag_names()
        for name in self.space.names:
            if name not in names and name not in SHAPE_PARTS:
                raise UsageError(
                    f"{name!r} is nothing to search over; a flag of `ridgeline train` is, such as "
                    f"lr, batch, schedule or lora{near_matches(name, [*names, *SHAPE_PARTS])}"
                )
            if name in FIXED:
                raise UsageError(
                    f"--{name} is what trials have in common, so that their losses compare; "
                    "search over another flag"
                )
        if self.equal != "free" and not self._shape_parts:
            raise UsageError(f"--equal {self.equal} is for networks; add --over layers=…")
        if self._shape_parts and self.base.shape is None:
            raise UsageError("layers, width and heads are searched with --shape, not of a model")
        if self.base.end.minutes is not None:
            raise UsageError("trials are runs of one length; give --steps or --tokens, no minutes")
        if self.base.data.held_out == 0:
            raise UsageError("--held-out is 0: trials are judged by held-out loss; give a share")
        for name, choices in self.space.entries:
            for value in choices.some(2):
                _check_value(self, name, value)

    @property
    def _shape_parts(self) -> list[str]:
        return [name for name in self.space.names if name in SHAPE_PARTS]

    @property
    def firsts(self) -> tuple[Point, ...]:
        """The base's own settings, where the space holds them."""
        names = flag_names()
        point = {
            name: attrgetter(names[name])(self.base) for name in self.space.names if name in names
        }
        return (point,) if self.space.holds(point) else ()

    def to_json(self) -> dict[str, Any]:
        return {
            "over": self.space.to_json(),
            "keep": self.rungs.keep,
            "rungs": self.rungs.num,
            "seed": self.seed,
            "equal": self.equal,
            "train": {"version": VERSION} | asdict(self.base),
        }


def _check_value(config: SearchConfig, name: str, value: Setting) -> None:
    """What no trial could be run with is refused before any is."""
    try:
        shape = edited(config, {name: value}).shape
        if name in SHAPE_PARTS and shape is not None:
            describe_shape(shape)
    except UsageError as error:
        raise UsageError(f"--over {name}: {error}") from None


def config_from_study(values: Mapping[str, Any], origin: str) -> SearchConfig:
    """Of a study that is gone on with."""
    entries = tuple((name, _choices(each)) for name, each in values["over"].items())
    return SearchConfig(
        parse_config(values["train"], origin),
        SearchSpace(entries),
        Rungs(values["keep"], values["rungs"]),
        values["seed"],
        values["equal"],
    )


def _choices(values: Mapping[str, Any]) -> Between | OneOf:
    if "values" in values:
        return OneOf(tuple(values["values"]))
    return Between(values["low"], values["high"], values["whole"])


def flag_names() -> dict[str, str]:
    """Dotted fields of a TrainConfig by their flags; a layout is no matter of search."""
    fields = dotted_fields(TrainConfig).items()
    return {flag_of(entry): name for name, entry in fields if not name.startswith("layout.")}


def kind_of(flag: str) -> type:
    """What a field takes: float for `lr`; str for words."""
    if flag in SHAPE_PARTS:
        return int
    names = flag_names()
    if flag not in names:
        hint = near_matches(flag, [*names, *SHAPE_PARTS])
        raise UsageError(f"--over {flag}: `ridgeline train` has no flag --{flag}{hint}")
    return field_kind(TrainConfig, names[flag])


def parse_space(texts: list[str], base: TrainConfig) -> SearchSpace:
    """Of `--over lr=1e-5..1e-3 --over batch=4,8`; without one the learning rate is searched."""
    if not texts:
        lr = base.optimizer.lr
        return SearchSpace((("lr", Between(lr / USUAL_REACH, lr * USUAL_REACH)),))
    entries = []
    for text in texts:
        name, equals, values = text.partition("=")
        if not equals or not values.strip():
            raise UsageError(f"--over {text!r} has no values; give --over lr=1e-5..1e-3")
        entries.append((name.strip(), parse_choices(name.strip(), values, kind_of(name.strip()))))
    return SearchSpace(tuple(entries))


def edited(config: SearchConfig, point: Mapping[str, Setting]) -> TrainConfig:
    """The run of a point: the base with these settings."""
    result, names = config.base, flag_names()
    parts = {name: int(value) for name, value in point.items() if name in SHAPE_PARTS}
    if parts:
        assert result.shape is not None, "checked when it was made"
        result = replace(result, shape=equal_shape(result.shape, parts, config.equal))
    for name, value in point.items():
        if name in names:
            result = _with(result, names[name].split("."), value)
    return result


def _with(config: Any, path: list[str], value: Setting) -> Any:
    if len(path) > 1:
        value = _with(getattr(config, path[0]), path[1:], value)
    return replace(config, **{path[0]: value})
