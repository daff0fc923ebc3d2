"""A step as plain numbers, from the rank that plans to the ranks that run it with it.

Those need the plan, and of each request only what decides which passes are made: how long its
prompt is, from which token on log-probabilities of it are wanted, and whether an embedding is. What
a request asks of sampling stays where it is sampled. Requests go by numbers, whatever their ids
are.

    words = step_words(plan, numbers)
    plan = plan_of(words)                   # with numbers where the request ids were
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import fields
from itertools import chain
from typing import Any

from ridgeline.engine.requests.request import Sampling
from ridgeline.engine.sampling.extras import DeviceJob, Pooling
from ridgeline.engine.scheduling.step_plan import StepPlan

POOLINGS: tuple[Pooling | None, ...] = (None, "last", "mean")
JOB_WORDS = 4
NUMBERS = ("step_id", "num_decode_rows", "num_draft_rows")
KEYS = ("keys", "sample_keys")
PAIRS = ("copies",)


def step_words(plan: StepPlan, numbers: Mapping[Hashable, int]) -> list[int]:
    """Field after field: how many numbers, and these."""
    words: list[int] = []
    for name in (field.name for field in fields(plan)):
        values = _flat(name, getattr(plan, name), numbers)
        words.append(len(values))
        words.extend(values)
    return words


def _flat(name: str, value: Any, numbers: Mapping[Hashable, int]) -> Sequence[int]:
    if name in NUMBERS:
        return [value]
    if name in KEYS:
        return [number for key, sample in value for number in (numbers[key], sample)]
    if name == "joined":
        return [part for seat, (key, sample) in value for part in (seat, numbers[key], sample)]
    found: Sequence[int] = list(chain.from_iterable(value)) if name in PAIRS else value
    return found


def plan_of(words: Sequence[int]) -> StepPlan:
    found: dict[str, Any] = {}
    start = 0
    for name in (field.name for field in fields(StepPlan)):
        end = start + 1 + words[start]
        found[name] = _shaped(name, list(words[start + 1 : end]))
        start = end
    return StepPlan(**found)


def _shaped(name: str, values: list[int]) -> Any:
    if name in NUMBERS:
        return values[0]
    if name in KEYS or name in PAIRS:
        return list(zip(values[::2], values[1::2], strict=True))
    if name == "joined":
        keys = zip(values[1::3], values[2::3], strict=True)
        return list(zip(values[::3], keys, strict=True))
    return values


def job_words(number: int, job: DeviceJob) -> list[int]:
    wanted = 0 if job.sampling.prompt_logprobs is None else job.first_scored
    return [number, len(job.prompt), wanted, POOLINGS.index(job.pooling)]


def job_of(words: Sequence[int]) -> tuple[int, DeviceJob]:
    """A request's number, and a job that leads to the same passes as the one it stands for."""
    number, length, wanted, pooling = words
    sampling = Sampling(max_tokens=1, seed=0, prompt_logprobs=0 if wanted else None)
    about = (sampling, (0,) * length, frozenset[int](), POOLINGS[pooling])
    return number, DeviceJob(*about, first_scored=wanted or 1)
