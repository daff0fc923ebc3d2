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
from itertools import chain
from typing import Any

from ridgeline.engine.requests.request import Sampling
from ridgeline.engine.sampling.extras import DeviceJob, Pooling
from ridgeline.engine.scheduling.state import StreamKey
from ridgeline.engine.scheduling.step_plan import LISTS, NUMBERS, PagePair, SeatTaken, StepPlan

POOLINGS: tuple[Pooling | None, ...] = (None, "last", "mean")
JOB_WORDS = 4


def step_words(plan: StepPlan, numbers: Mapping[Hashable, int]) -> list[int]:
    """The plan's numbers; then field after field: how many words, and these."""
    words = [getattr(plan, name) for name in NUMBERS]
    for name, _, entry in LISTS:
        values = _flat(entry, getattr(plan, name), numbers)
        words.append(len(values))
        words.extend(values)
    return words


def _flat(entry: Any, values: Any, numbers: Mapping[Hashable, int]) -> Sequence[int]:
    """Entries of one type as words."""
    if entry is int:
        words: Sequence[int] = values
        return words
    if entry == StreamKey:
        return [word for key, sample in values for word in (numbers[key], sample)]
    if entry == PagePair:
        return list(chain.from_iterable(values))
    assert entry == SeatTaken, f"{entry} has no words yet"
    return [word for seat, (key, sample) in values for word in (seat, numbers[key], sample)]


def plan_of(words: Sequence[int]) -> StepPlan:
    start = len(NUMBERS)
    values: list[Any] = list(words[:start])
    for _, _, entry in LISTS:
        end = start + 1 + words[start]
        values.append(_shaped(entry, list(words[start + 1 : end])))
        start = end
    return StepPlan(*values)


def _shaped(entry: Any, words: list[int]) -> Sequence[Any]:
    """What `_flat` made the words of."""
    if entry is int:
        return words
    if entry in (StreamKey, PagePair):
        return list(zip(words[::2], words[1::2], strict=True))
    keys = zip(words[1::3], words[2::3], strict=True)
    return list(zip(words[::3], keys, strict=True))


def job_words(number: int, job: DeviceJob) -> list[int]:
    wanted = 0 if job.sampling.prompt_logprobs is None else job.first_scored
    return [number, len(job.prompt), wanted, POOLINGS.index(job.pooling)]


def job_of(words: Sequence[int]) -> tuple[int, DeviceJob]:
    """A request's number, and a job that leads to the same passes as the one it stands for."""
    number, length, wanted, pooling = words
    sampling = Sampling(max_tokens=1, seed=0, prompt_logprobs=0 if wanted else None)
    job = DeviceJob(
        sampling,
        prompt=(0,) * length,
        stop_ids=frozenset(),
        pooling=POOLINGS[pooling],
        first_scored=wanted or 1,
    )
    return number, job
