"""The cases an exercise is held to, and how an answer is compared. Lessons' check cells yield them.

yield AnswerTrial.of(pages_needed, 17, 16, want=2, hint="a page that is partly full counts")
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

LONGEST = 200  # letters of an argument or answer, as shown


@dataclass(frozen=True)
class AnswerTrial:
    given: str  # the call, as one would type it
    call: Callable[[], object]
    want: object
    hint: str = ""
    tolerance: float = 1e-5  # relative; of tensors also absolute

    @classmethod
    def of(
        cls,
        function: Callable[..., object],
        *arguments: Any,
        want: object,
        hint: str = "",
        tolerance: float = 1e-5,
    ) -> AnswerTrial:
        words = ", ".join(brief(argument) for argument in arguments)
        name = getattr(function, "__name__", "your function")
        return cls(
            f"{name}({words})", lambda: function(*arguments), want, hint=hint, tolerance=tolerance
        )


def first_failure(trials: Iterable[AnswerTrial]) -> tuple[int, dict[str, Any] | None]:
    """How many passed, and the first that did not, in words."""
    passed = 0
    for trial in trials:
        try:
            answer = trial.call()
        except NotImplementedError as error:
            return passed, failure(trial, f"not written yet ({error})")
        except Exception as error:
            return passed, failure(trial, f"raised {type(error).__name__}: {error}")
        wrong = difference(answer, trial.want, trial.tolerance)
        if wrong is not None:
            return passed, failure(trial, wrong)
        passed += 1
    return passed, None


def failure(trial: AnswerTrial, answer: str) -> dict[str, Any]:
    return {
        "given": trial.given,
        "want": brief(trial.want),
        "answer": answer[:400],
        "hint": trial.hint,
    }


def difference(answer: object, want: object, tolerance: float) -> str | None:
    """What is wrong with an answer, or None."""
    if isinstance(want, Tensor):
        return _tensor_difference(answer, want, tolerance)
    if isinstance(want, float):
        if isinstance(answer, Tensor) and answer.numel() == 1:
            answer = answer.item()
        is_number = isinstance(answer, int | float) and not isinstance(answer, bool)
        if is_number and math.isclose(answer, want, rel_tol=tolerance, abs_tol=1e-12):  # type: ignore[arg-type]
            return None
        return brief(answer)
    if isinstance(want, list | tuple):
        return _sequence_difference(answer, want, tolerance)
    return None if answer == want else brief(answer)


def _sequence_difference(answer: object, want: Sequence[object], tolerance: float) -> str | None:
    if not isinstance(answer, list | tuple) or len(answer) != len(want):
        return brief(answer)
    parts = (difference(own, other, tolerance) for own, other in zip(answer, want, strict=True))
    return brief(answer) if any(part is not None for part in parts) else None


def _tensor_difference(answer: object, want: Tensor, tolerance: float) -> str | None:
    if not isinstance(answer, Tensor):
        return f"{brief(answer)}, which is no tensor"
    if answer.shape != want.shape:
        return f"a tensor of shape {tuple(answer.shape)}, where {tuple(want.shape)} is right"
    own, other = answer.detach().cpu().double(), want.detach().cpu().double()
    if torch.allclose(own, other, rtol=tolerance, atol=tolerance):
        return None
    apart = (own - other).abs().nan_to_num(nan=math.inf)
    place = tuple(int(x) for x in torch.unravel_index(apart.argmax(), apart.shape))
    return f"{own[place].item():.6g} at {list(place)}, where {other[place].item():.6g} is right"


def brief(value: object) -> str:
    if isinstance(value, Tensor):
        if value.numel() <= 8:
            return f"tensor({brief(value.tolist())})"
        return f"<{'×'.join(map(str, value.shape))} {str(value.dtype).removeprefix('torch.')}>"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list | tuple) and value and len(str(value)) <= 4 * LONGEST:
        parts = ", ".join(map(brief, value))
        return f"[{parts}]" if isinstance(value, list) else f"({parts})"
    text = repr(value)
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"
