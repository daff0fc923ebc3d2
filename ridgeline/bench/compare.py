"""One model in several dtypes and schemes on the same workload, in rounds that take turns: what
else the machine does meanwhile happens to all of them.

All engines are there at once, each with its share of the memory. The fastest plain dtype is what
the others are held against; the median of a variant's rounds counts, and its best is told. Where
others use the machine too, tokens by second of processor time say more: on a CPU, with one thread
(threads that wait for each other spend time as well).

    variants = variants_of("fp32,bf16,int8,int8+head,int8+lookup", "bf16")
    result = compared({name: Engine(path, recipe) ...}, workload, hardware, rounds=7)
    result.base.name, result.speedup(result.variants[2]), result.best_speedup(result.variants[2])
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple, get_args

from ridgeline.bench.engine import EngineRun, run_workload
from ridgeline.data.workload import Workload
from ridgeline.engine import Engine
from ridgeline.errors import UsageError
from ridgeline.hardware import Hardware
from ridgeline.progress import Progress
from ridgeline.quantization.scheme import parse_scheme
from ridgeline.recipe import Dtype

SHORTEST_S = 1e-6  # a clock's step, where nothing else is seen
# What may stand behind a dtype or a scheme, and what it changes.
ADDED = {"head": {"head": "int8"}, "lookup": {"speculation": "prompt-lookup"}}
PLAIN = tuple(name for name in get_args(Dtype) if name != "auto")


class VariantEdit(NamedTuple):
    """What a variant changes of the recipe."""

    dtype: str
    scheme: str | None
    head: str = "plain"
    speculation: str | None = None


class Variant(NamedTuple):
    name: str
    runs: list[EngineRun]

    @property
    def is_plain(self) -> bool:
        return self.name in PLAIN

    @property
    def rates(self) -> list[float]:
        """Output tokens a second of each round."""
        return [run.output_tokens_per_s for run in self.runs]

    @property
    def median(self) -> float:
        return median(self.rates)

    @property
    def best(self) -> float:
        return max(self.rates)

    @property
    def cpu_median(self) -> float:
        """Output tokens by second of processor time."""
        return median(run.num_output_tokens / max(run.cpu_s, SHORTEST_S) for run in self.runs)


@dataclass(frozen=True)
class Compared:
    variants: list[Variant]

    @property
    def base(self) -> Variant:
        """The fastest that is plain; without one, the first."""
        plain = [variant for variant in self.variants if variant.is_plain]
        return max(plain, key=lambda variant: variant.median, default=self.variants[0])

    def speedup(self, variant: Variant) -> float:
        """By the medians."""
        return variant.median / self.base.median

    def cpu_speedup(self, variant: Variant) -> float:
        """By processor time, against the fastest plain one by that measure."""
        plain = [each.cpu_median for each in self.variants if each.is_plain]
        return variant.cpu_median / max(plain, default=self.base.cpu_median)

    def best_speedup(self, variant: Variant) -> float:
        """Best against best of any that is plain."""
        plain = [each.best for each in self.variants if each.is_plain]
        return variant.best / max(plain, default=self.base.best)


def variants_of(names: str, dtype: str) -> dict[str, VariantEdit]:
    """`fp32,int8` by name: a dtype is plain, a scheme has the rest of the model in `dtype`. With
    `+head` behind it, either has the head in int8; with `+lookup`, prompt lookup drafts tokens.
    """
    result: dict[str, VariantEdit] = {}
    for word in names.split(","):
        name = word.strip()
        if name in result:
            raise UsageError(f"--compare names {name} twice; give each dtype or scheme once")
        form, *added = name.split("+")
        for part in added:
            if part not in ADDED:
                raise UsageError(f"--compare has +{part}; known are +{' and +'.join(ADDED)}")
        edit = (
            VariantEdit(form, None)
            if form in PLAIN
            else VariantEdit(dtype, parse_scheme(form).name)
        )
        changes = {key: value for part in added for key, value in ADDED[part].items()}
        result[name] = edit._replace(**changes)
    if len(result) < 2:
        raise UsageError(
            f"--compare is {names!r}; give at least two of {', '.join(PLAIN)} and the schemes, "
            "as bf16,int8"
        )
    return result


def memory_share(share: float, index: int, count: int) -> float:
    """Of what is free when `index` engines of `count` are there: all take the same."""
    return share / (count - index * share)


def compared(
    engines: Mapping[str, Engine],
    workload: Workload,
    hardware: Hardware,
    rounds: int,
    progress: Progress | None = None,
) -> Compared:
    variants = [Variant(name, []) for name in engines]
    for number in range(rounds):
        for variant in variants:
            if progress is not None:
                progress(f"round {number + 1}, {variant.name}", number, rounds)
            variant.runs.append(run_workload(engines[variant.name], workload, hardware))
    return Compared(variants)
