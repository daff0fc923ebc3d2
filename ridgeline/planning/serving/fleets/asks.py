"""A workload's requests as schedulers take them, made one by one, since together they are long.

Prompts of which only lengths are known differ from the first token; equal blocks have equal tokens,
so that beginnings are shared as they would be.

    for ask in asks(workload): replica.submit(ask, ask.arrival)
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator

from ridgeline.data.workload import Workload
from ridgeline.engine.scheduling.state import Ask


def asks(workload: Workload) -> Iterator[Ask]:
    """In the order they arrive."""
    for index in range(len(workload.requests)):
        yield ask_of(workload, index)


def ask_of(workload: Workload, index: int, arrival: float | None = None) -> Ask:
    """The request of this number, at its own time or another."""
    request = workload.requests[index]
    at = request.arrival_s if arrival is None else arrival
    return Ask(index, _prompt(workload, index), request.num_output_tokens, arrival=at)


def _prompt(workload: Workload, index: int) -> array[int]:
    """Odd numbers are a request's own, even ones those of blocks."""
    request = workload.requests[index]
    if request.prompt is not None:
        return array("i", request.prompt)
    if not request.block_hashes:
        return array("i", [_token(2 * index + 1)]) * request.num_prompt_tokens
    tokens = array("i")
    for block in request.block_hashes:
        tokens.extend(array("i", [_token(2 * block)]) * workload.block_tokens)
    return tokens[: request.num_prompt_tokens]


def _token(number: int) -> int:
    """Any 31 bits are a token here."""
    return number % 2**31
