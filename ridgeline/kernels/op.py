"""What an op is to everything that walks the registry: its definition, its launcher, its work, its
shapes.

Tests check `launch` against `reference` on `small_cases` (under Triton's interpreter) and `cases`
(on a GPU), the benchmark times `bench_cases` beside the `baselines`, and the compiler takes from
`compile_cases` what would be launched on each target. `launch`, `reference`, `cost` and each
baseline take the same keyword arguments: what a case's `make` returns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict

import torch

from ridgeline.kernels.cost import OpCost
from ridgeline.kernels.targets import Target

OpInputs = dict[str, Any]
# Returns a tensor or a tuple of tensors, those changed in place included.
Function = Callable[..., Any]


@dataclass(frozen=True)
class Case:
    """One set of inputs: random, made anew for each use from a seeded generator."""

    label: str  # "4096x8192 bf16"
    make: Callable[[torch.device, torch.Generator], OpInputs]
    dtype: torch.dtype  # which row of the tolerance table holds
    reduction: int = 1  # how many products are summed into one output
    roundings: int = 1  # how often a value is rounded to `dtype` on its way to the output
    gradients: tuple[str, ...] = ()  # inputs whose gradients are checked too


@dataclass(frozen=True)
class ConfigSearch:
    """Configs to time for a case, most promising first, each as the launcher's `config`."""

    op: str  # the op under whose name the launcher looks the choice up
    key: str  # and the key: dtypes and shape range
    configs: Sequence[Any]  # dataclasses of plain values
    peers: tuple[str, ...] = ()  # baselines that the public function can hand the work to instead


@dataclass(frozen=True)
class Op:
    name: str  # its folder, with _backward after it for the backward pass of one
    summary: str  # one line
    reference: Function
    launch: Function
    cost: Callable[..., OpCost]
    small_cases: Sequence[Case]  # awkward and small: at most about 200 programs each
    cases: Sequence[Case]  # awkward and large, offsets past 2^31 included
    bench_cases: Sequence[Case]
    compile_cases: Sequence[Case]  # made on the CPU, small in memory; the constants are what counts
    baselines: Mapping[str, Function] = field(default_factory=dict)  # "eager", "cublas", …
    # Further implementations ("cuda"), checked and timed like `launch`; each raises
    # UnsupportedError for what it does not do, or where it was not built.
    variants: Mapping[str, Function] = field(default_factory=dict)
    differentiable: Function | None = None  # the op with its gradients, where training needs them
    # Configs to time for a case's inputs.
    search: Callable[..., ConfigSearch | None] | None = None
    supports: Callable[[Target, Case], bool] = lambda target, case: True


class OpFunctions(TypedDict):
    reference: Function
    launch: Function
    cost: Callable[..., OpCost]
    baselines: dict[str, Function]


def functions(
    reference: Function, launch: Function, cost: Callable[..., OpCost], **baselines: Function
) -> OpFunctions:
    """An Op's functions, and by their names those that it is timed against."""
    return {"reference": reference, "launch": launch, "cost": cost, "baselines": baselines}


class CaseLists(TypedDict):
    small_cases: list[Case]
    cases: list[Case]
    bench_cases: list[Case]
    compile_cases: list[Case]


def case_lists(
    small: Iterable[Case], large: Iterable[Case], bench: Iterable[Case], compiled: Iterable[Case]
) -> CaseLists:
    """An Op's cases: what a GPU checks are the small ones and the large ones."""
    small_cases = list(small)
    return {
        "small_cases": small_cases,
        "cases": [*small_cases, *large],
        "bench_cases": list(bench),
        "compile_cases": list(compiled),
    }


def outputs(result: Any) -> tuple[torch.Tensor, ...]:
    """What a function of an op returned, as a tuple."""
    return result if isinstance(result, tuple) else (result,)
