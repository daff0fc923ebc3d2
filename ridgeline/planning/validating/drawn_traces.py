"""Traffic over time, drawn from a seed, so that anybody can run it and simulate it: the lengths and
arrivals of conversations, of questions about documents that share their beginnings, and of long
answers to short questions. Lengths follow what Azure and Mooncake published of their traffic.

    drawn_trace("chat", num_requests=200, rate=12.0)        # requests/s on average
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import accumulate, islice

from ridgeline.data.workload import Workload, WorkloadRequest
from ridgeline.errors import UsageError, near_matches

BLOCK = 512  # tokens of a block that prompts share
Drawn = Iterator[tuple[int, int, tuple[int, ...]]]  # prompt tokens, output tokens, blocks


def drawn_trace(name: str, num_requests: int, rate: float, seed: int = 0) -> Workload:
    """So many requests of one of `TRACES`, arriving at this rate."""
    if name not in TRACES:
        raise UsageError(
            f"trace {name!r} is unknown; choose from {', '.join(TRACES)}"
            + near_matches(name, TRACES)
        )
    draw, gaps = random.Random(f"{name} {seed}"), random.Random(f"arrivals of {name} {seed}")
    shape = BURSTINESS[name]
    waits = (gaps.gammavariate(shape, 1 / (shape * rate)) for _ in range(num_requests - 1))
    arrivals = accumulate(waits, initial=0.0)
    drawn = islice(TRACES[name](draw), num_requests)
    requests = (
        WorkloadRequest(prompt, output, round(arrival, 6), block_hashes=blocks)
        for (prompt, output, blocks), arrival in zip(drawn, arrivals, strict=True)
    )
    return Workload(name, tuple(requests), BLOCK)


def _chat(draw: random.Random) -> Drawn:
    """As Azure's conversations of 2023: 1,150 tokens in and 260 out in the mean."""
    while True:
        yield _length(draw, 6.71, 0.94, 16, 6000), _length(draw, 5.23, 0.92, 8, 1000), ()


def _documents(draw: random.Random) -> Drawn:
    """Each of a dozen documents is asked about again and again, as in Mooncake's traces."""
    number, open_documents = 0, [_document(draw, each) for each in range(12)]
    next_document = len(open_documents)
    while True:
        place = draw.randrange(len(open_documents))
        if draw.random() < 0.15:  # another one takes its place
            open_documents[place] = _document(draw, next_document)
            next_document += 1
        shared = open_documents[place]
        question = draw.randint(40, 400)
        blocks = (*shared, 10**6 + number)
        number += 1
        yield BLOCK * len(shared) + question, _length(draw, 5.0, 0.8, 8, 600), blocks


def _document(draw: random.Random, number: int) -> tuple[int, ...]:
    return tuple(1000 * number + block for block in range(draw.randint(4, 20)))


def _answers(draw: random.Random) -> Drawn:
    """Short questions, long answers."""
    while True:
        yield _length(draw, 4.8, 0.6, 16, 1000), _length(draw, 6.5, 0.5, 100, 2000), ()


def _length(draw: random.Random, mean: float, spread: float, low: int, high: int) -> int:
    """Of a logarithm's mean and spread."""
    return min(high, max(low, int(draw.lognormvariate(mean, spread))))


TRACES: dict[str, Callable[[random.Random], Drawn]] = {
    "chat": _chat,
    "documents": _documents,
    "answers": _answers,
}
# Shape of the gaps between arrivals: 1 is as by chance, less comes in bursts.
BURSTINESS = {"chat": 1.0, "documents": 0.35, "answers": 1.0}
