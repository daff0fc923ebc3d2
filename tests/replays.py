"""Requests replayed in other company: what each of them gets, bit for bit."""

from __future__ import annotations

import random
from typing import Any

import torch
from engines import prompts_of

from ridgeline.engine import Engine, Output, Sampling

Request = tuple[list[int], Sampling]
Logits = dict[tuple[int, int], torch.Tensor]  # by request, and the position of the token sampled


def requests_of(
    count: int, longest: int, max_tokens: tuple[int, int], vocab_size: int = 131, seed: int = 0
) -> list[Request]:
    """Prompts of all lengths, half of them beginning like another, sampled in several ways."""
    draw = random.Random(seed)
    (base,) = prompts_of([longest], seed=seed + 1, vocab_size=vocab_size)
    lengths = [draw.randint(1, longest) for _ in range(count)]
    prompts = prompts_of(lengths, seed=seed + 2, vocab_size=vocab_size)
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 0.9},
        {"temperature": 1.0, "top_p": 0.8, "top_k": 40, "logprobs": 2},
        {"temperature": 0.8, "frequency_penalty": 0.4, "logit_bias": {7: 2.0}},
        {"logprobs": 0},
    ]
    found = []
    for number, prompt in enumerate(prompts):
        if number % 2:
            shared = draw.randint(0, len(prompt) - 1)
            prompt = base[:shared] + prompt[shared:]
        sampling = Sampling(
            max_tokens=draw.randint(*max_tokens),
            seed=number,
            **kinds[number % len(kinds)],
        )
        found.append((prompt, sampling))
    return found


def replay(
    engine: Engine,
    requests: list[Request],
    order: list[int],
    at_once: int,
    kept: Logits,
    preempt: float = 0.0,
) -> dict[int, Output]:
    """Requests in this order, with at most so many in the engine; `kept` takes the logits of every
    token that was sampled, or holds what they must be. Before a step, with the probability
    `preempt`, somebody who decodes has to start again.
    """
    draw, running = random.Random(len(order)), engine.scheduler._running
    different = watch(engine, kept)
    waiting, outputs = list(reversed(order)), {}
    live = 0
    while waiting or engine.has_work:
        while waiting and live < at_once:
            number = waiting.pop()
            prompt, sampling = requests[number]
            engine.add(prompt, sampling, request_id=number)
            live += 1
        if running.decoding and draw.random() < preempt:
            running.preempt(draw.choice(running.decoding))
        for event in engine.step():
            if isinstance(event, Output):
                assert event.status == "finished", event.reason
                outputs[event.request_id] = event
                live -= 1
    assert not different, f"logits differ: {different[:5]}"
    return outputs


def watch(engine: Engine, kept: Logits) -> list[tuple[int, int]]:
    """Note the logits of every sample; of those that are there already, the ones whose bits are not
    the same. (An error in here would be taken for the request's.)
    """
    finish, different = engine.runner.finish, []

    def watching(step: Any, logits_RV: torch.Tensor, *rest: Any) -> Any:
        plan = step.plan
        for index, (number, _) in enumerate(plan.sample_keys):
            key = (number, plan.positions[plan.logit_tokens[index]] + 1)
            found = logits_RV[index].clone()
            if not torch.equal(kept.setdefault(key, found), found):
                different.append(key)
        return finish(step, logits_RV, *rest)

    engine.runner.finish = watching  # type: ignore[method-assign]
    return different


def assert_same(outputs: dict[int, Output], expected: dict[int, Output]) -> None:
    for number, right in expected.items():
        assert outputs[number].tokens == right.tokens, f"request {number}"
        for found, other in zip(outputs[number].completions, right.completions, strict=True):
            assert found.logprobs == other.logprobs, f"log-probabilities of request {number}"
