"""Whether codes can be cut among ranks: weights that share a scale stay together.

check_cut(config, 2, {"layers.0.mlp.down": parse_scheme("int4-g128")})  # UsageError where they
                                                                        # cannot, with what can
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ridgeline.errors import UsageError
from ridgeline.models import ModelConfig
from ridgeline.parallel.degrees import can_share
from ridgeline.parallel.shards import shard_of
from ridgeline.quantization.files.matrix import shared_columns, shared_rows
from ridgeline.quantization.scheme import GROUPS, Scheme, parse_scheme
from ridgeline.quantization.sizes import MatrixSize, named_matrices


def schemes_by_layer(config: ModelConfig, scheme: Scheme) -> dict[str, Scheme]:
    """Of the projections that a scheme fits."""
    return {name: scheme for name, matrix in named_matrices(config) if scheme.fits(*matrix)}


def check_cut(
    config: ModelConfig, size: int, schemes: Mapping[str, Scheme], is_chosen: bool = True
) -> None:
    """`schemes` are those of a model's projections, by name. `is_chosen`: by the recipe, which may
    choose another; a checkpoint's codes are what they are.
    """
    problem = next(_problems(config, size, schemes), None)
    if problem is None:
        return
    name, what = problem
    scheme = schemes[name]
    others = [each.name for each in _smaller(scheme) if is_cut(config, size, each)]
    remedies = [f"scheme {others[0]}"] if is_chosen and others else []
    fewer = [
        degree
        for degree in range(size - 1, 0, -1)
        if can_share(config, degree) and not any(_problems(config, degree, schemes))
    ]
    remedies += [f"tensor_parallel {fewer[0]}"]  # 1 does always
    raise UsageError(
        f"{scheme.name} cannot be shared by tensor_parallel {size}: {what}; try "
        f"{' or '.join(remedies)}"
    )


def is_cut(config: ModelConfig, size: int, scheme: Scheme) -> bool:
    return not any(_problems(config, size, schemes_by_layer(config, scheme)))


def _smaller(scheme: Scheme) -> Iterator[Scheme]:
    """What may do instead, the nearest first."""
    suffix = "" if scheme.symmetric else "-asym"
    if scheme.spread == "group":
        groups = sorted((group for group in GROUPS if group < scheme.group), reverse=True)
        yield from (parse_scheme(f"int4-g{group}{suffix}") for group in groups)
    yield parse_scheme("fp8" if scheme.weight == "fp8" else "int8")


def _problems(
    config: ModelConfig, size: int, schemes: Mapping[str, Scheme]
) -> Iterator[tuple[str, str]]:
    """Projections that cannot be cut, and why."""
    if size == 1:
        return
    matrices = dict(named_matrices(config))
    checked: set[tuple[str, Scheme, MatrixSize]] = set()
    for name, scheme in schemes.items():
        kind = (name.rpartition(".")[2], scheme, matrices[name])
        if kind in checked:
            continue
        checked.add(kind)
        problem = _problem(name, scheme, config, size)
        if problem is not None:
            yield name, problem


def _problem(name: str, scheme: Scheme, config: ModelConfig, size: int) -> str | None:
    for rank in range(size):
        shard = shard_of(f"{name}.weight", config, rank, size)
        if shard is None:
            continue
        step, what = shared_rows(scheme), "outputs"
        if shard.dim == 1:
            step, what = shared_columns(scheme), "inputs"
        if any(part.start % step or len(part) % step for part in shard.ranges):
            count = sum(map(len, shard.ranges))
            return f"a rank has {count} {what} of {name}, and {step} share a scale"
    return None
