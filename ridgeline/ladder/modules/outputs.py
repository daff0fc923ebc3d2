"""How far a changed module's outputs are from the original's, for outputs of any nesting.

Each tensor of fractions: the size of the difference over the size of the original, and the cosine
between them, in fp64. Tensors of whole numbers, and plain values: the share that changed. Tensors
called logits (or the only one, where a bound on KL is given): KL divergence of their softmax. The
worst tensor counts.

    difference(original, changed, Bounds(max_error=0.02)).problem
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ridgeline.errors import UsageError
from ridgeline.ladder.outcome import Difference
from ridgeline.profiling.modules.devices import leaves

ROWS_AT_ONCE = 4096  # of logits, in fp64


@dataclass(frozen=True)
class OutputBounds:
    max_error: float = 0.02  # of the relative error, and of the share of whole numbers that changed
    max_kl: float | None = None  # nats, of logits

    def __post_init__(self) -> None:
        for name in ("max_error", "max_kl"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise UsageError(f"{name} is {value}; give 0 or a positive number")

    def to_json(self) -> dict[str, float | None]:
        return {"max_error": self.max_error, "max_kl": self.max_kl}


@dataclass
class _Worst:
    error: float = 0.0
    cosine: float = 1.0
    changed: float = 0.0
    kl: float | None = None
    num_tensors: int = 0
    problem: str | None = None


def difference(original: Any, changed: Any, bounds: OutputBounds) -> Difference:
    first, second = dict(leaves(original)), dict(leaves(changed))
    worst = _Worst()
    if first.keys() != second.keys():
        odd = sorted(first.keys() ^ second.keys())[0]
        worst.problem = f"the outputs have another structure: {odd or 'the value'} is in one only"
    else:
        only = sum(isinstance(leaf, Tensor) for leaf in first.values()) == 1
        for path, leaf in first.items():
            is_logits = "logits" in path or (only and bounds.max_kl is not None)
            _compare(path or "the output", leaf, second[path], is_logits, worst)
    problem = worst.problem or _outside(worst, bounds)
    return Difference(
        worst.error, worst.cosine, worst.changed, worst.kl, worst.num_tensors, problem
    )


def _outside(worst: _Worst, bounds: OutputBounds) -> str | None:
    if not worst.error <= bounds.max_error:
        return f"relative error is {worst.error:.2g}, allowed is {bounds.max_error:g}"
    if worst.changed > bounds.max_error:
        return f"{worst.changed:.2%} of outputs changed, allowed is {bounds.max_error:.2%}"
    if bounds.max_kl is not None and worst.kl is not None and not worst.kl <= bounds.max_kl:
        return f"mean KL is {worst.kl:.2g}, allowed is {bounds.max_kl:g}"
    return None


def _compare(path: str, original: Any, changed: Any, is_logits: bool, worst: _Worst) -> None:
    if isinstance(original, Tensor) != isinstance(changed, Tensor):
        worst.problem = f"{path} is a {type(changed).__name__}, not a {type(original).__name__}"
    elif not isinstance(original, Tensor):
        if type(original) in (bool, int, float, str) and not _same(original, changed):
            worst.changed = 1.0
    elif original.shape != changed.shape:
        worst.problem = f"{path} has the shape {tuple(changed.shape)}, not {tuple(original.shape)}"
    elif original.numel():
        worst.num_tensors += 1
        if original.is_floating_point() or original.is_complex():
            _compare_fractions(path, original, changed, is_logits, worst)
        else:
            share = (original != changed.to(original.device)).double().mean().item()
            worst.changed = max(worst.changed, share)


def _same(original: Any, changed: Any) -> bool:
    if isinstance(original, float):
        return math.isclose(original, changed, rel_tol=1e-2) or (original != original)
    return bool(original == changed)


def _compare_fractions(
    path: str, original: Tensor, changed: Tensor, is_logits: bool, worst: _Worst
) -> None:
    kind = torch.complex128 if original.is_complex() else torch.float64
    a = original.detach().to(kind).flatten()
    b = changed.detach().to(original.device, kind).flatten()
    finite = torch.isfinite(a)
    same_elsewhere = torch.equal(a[~finite].nan_to_num(), b[~finite].nan_to_num())
    if not torch.isfinite(b[finite]).all() or not same_elsewhere:
        worst.problem = f"{path} is NaN or infinite where the original is not"
        return
    a, b = a[finite], b[finite]
    size, other_size = a.norm().item(), b.norm().item()
    error, cosine = (0.0, 1.0) if other_size == size == 0 else (1.0, 0.0)
    if size and other_size:
        error = (a - b).norm().item() / size
        cosine = (a.conj() @ b).abs().item() / (size * other_size)
    worst.error, worst.cosine = max(worst.error, error), min(worst.cosine, cosine)
    if is_logits and original.dim() > 1 and finite.all():
        result = mean_kl(original, changed)
        worst.kl = max(worst.kl or 0.0, result)


def mean_kl(original: Tensor, changed: Tensor) -> float:
    """Of the distributions that logits [..., V] stand for."""
    total, size = 0.0, original.shape[-1]
    firsts = original.detach().reshape(-1, size).split(ROWS_AT_ONCE)
    seconds = changed.detach().to(original.device).reshape(-1, size).split(ROWS_AT_ONCE)
    for first, second in zip(firsts, seconds, strict=True):
        log_p, log_q = first.double().log_softmax(-1), second.double().log_softmax(-1)
        total += (log_p.exp() * (log_p - log_q)).sum().item()
    return max(0.0, total * size / original.numel())
