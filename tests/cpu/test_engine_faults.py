"""What goes wrong for one request goes wrong for that one alone, and everything goes on."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from engines import (
    assert_exact,
    assert_idle,
    assert_only_these_failed,
    engine_for,
    naive_outputs,
    prompts_of,
    tiny,
)

from ridgeline.engine import Engine, Output, Sampling
from ridgeline.engine.execution.faults import cut
from ridgeline.engine.sampling.live import LiveRequest
from ridgeline.engine.scheduling.scheduler import Scheduler, SchedulerConfig
from ridgeline.engine.scheduling.state import Ask
from ridgeline.errors import HardwareError

GREEDY = Sampling(max_tokens=12)
POISON = 77


def poisoned_prompts() -> tuple[list[list[int]], list[int]]:
    """Eight prompts, and which of them hold the poison."""
    prompts = [
        [token for token in prompt if token != POISON]
        for prompt in prompts_of([9, 30, 14, 22, 5, 41, 17, 12])
    ]
    for index in (2, 5):
        prompts[index][3] = POISON
    for prompt in prompts:  # nor is it an answer
        assert POISON not in naive_outputs(tiny("llama-mha"), prompt, GREEDY)[0]
    return prompts, [2, 5]


def outputs_with(engine: Engine, prompts: list[list[int]]) -> list[Output]:
    outputs = engine.generate(prompts, GREEDY)
    assert_idle(engine)
    return outputs


@pytest.mark.parametrize("overlap", [True, False])
def test_a_forward_pass_that_raises_is_bisected(
    overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, wrong = poisoned_prompts()
    engine = engine_for(tiny("llama-mha"), overlap=overlap)
    forward = engine.runner.forward

    def raising(inputs: Any, *rest: Any) -> torch.Tensor:
        if (inputs.ids == POISON).any() and (inputs.positions[inputs.ids == POISON] == 3).any():
            raise RuntimeError("poison")
        return forward(inputs, *rest)

    monkeypatch.setattr(engine.runner, "forward", raising)
    outputs = outputs_with(engine, prompts)
    assert_only_these_failed(outputs, prompts, GREEDY, wrong, "RuntimeError: poison")


@pytest.mark.parametrize("overlap", [True, False])
def test_nan_ends_its_own_request(overlap: bool) -> None:
    prompts, wrong = poisoned_prompts()
    model = deepcopy(tiny("llama-mha"))
    with torch.no_grad():
        model.embed.weight[POISON] = float("nan")
    engine = engine_for(model, overlap=overlap)
    outputs = outputs_with(engine, prompts)
    assert_only_these_failed(outputs, prompts, GREEDY, wrong, "not numbers (NaN)")
    clean = [[*prompt[:3], 50, *prompt[4:]] for prompt in prompts]
    # Nothing they computed is kept, and what it left behind in their pages harms nobody.
    assert_exact(engine, clean, [GREEDY] * len(clean))


@pytest.mark.parametrize("most", [40, 20, 1])
def test_out_of_memory_makes_smaller_steps(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass of more tokens than `most` does not fit; nobody notices but for the time."""
    engine = engine_for(tiny("llama-mha"))
    forward, sizes = engine.runner.forward, []

    def tight(inputs: Any, kind: Any, *rest: Any) -> torch.Tensor:
        sizes.append(kind.shape.num_tokens)
        if kind.shape.num_tokens > most:
            raise torch.OutOfMemoryError("no memory left")
        return forward(inputs, kind, *rest)

    monkeypatch.setattr(engine.runner, "forward", tight)
    prompts = prompts_of([9, 30, 14, 22, 5, 41, 17, 12])
    assert_exact(engine, prompts, [GREEDY] * len(prompts))
    assert max(sizes) > most
    assert engine.scheduler.token_budget == max(16, 32 if most == 40 else 16)


def test_a_request_that_never_fits_fails_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_for(tiny("llama-mha"))

    def full(*_: Any) -> torch.Tensor:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: 1 bytes")

    monkeypatch.setattr(engine.runner, "forward", full)
    outputs = outputs_with(engine, prompts_of([9, 30]))
    assert [output.status for output in outputs] == ["failed", "failed"]
    assert "can't allocate memory" in outputs[0].reason


@pytest.mark.parametrize("method", ["push", "take_prompt"])
def test_an_exception_on_the_host_ends_its_own_request(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, prompts = engine_for(tiny("llama-mha")), prompts_of([9, 30, 14])
    original = getattr(LiveRequest, method)

    def raising(self: LiveRequest, *args: Any, **named: Any) -> Any:
        if self.job.prompt == tuple(prompts[1]):
            raise KeyError("a bug of ours")
        return original(self, *args, **named)

    monkeypatch.setattr(LiveRequest, method, raising)
    outputs = engine.generate(prompts, Sampling(max_tokens=6, prompt_logprobs=0))
    assert [output.status for output in outputs] == ["finished", "failed", "finished"]
    assert "a bug of ours" in outputs[1].reason
    assert_idle(engine)


def test_a_seat_that_cannot_be_taken_ends_its_own_request(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, prompts = engine_for(tiny("llama-mha")), prompts_of([9, 30, 14])
    sit = engine.runner.sampler.special.sit

    def raising(seat: int, sampling: Sampling, prompt: Any, *rest: Any) -> None:
        if prompt == tuple(prompts[1]):
            raise ValueError("no table")
        sit(seat, sampling, prompt, *rest)

    monkeypatch.setattr(engine.runner.sampler.special, "sit", raising)
    outputs = engine.generate(prompts, GREEDY)
    assert [output.status for output in outputs] == ["finished", "failed", "finished"]
    assert [outputs[2].tokens] == naive_outputs(engine.model, prompts[2], GREEDY)


def test_a_lost_device_is_an_error_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_for(tiny("llama-mha"))

    def lost(*_: Any) -> torch.Tensor:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore")

    monkeypatch.setattr(engine.runner, "forward", lost)
    with pytest.raises(HardwareError, match="illegal memory access"):
        engine.generate(prompts_of([9]), GREEDY)


def test_progress_is_told() -> None:
    engine = engine_for(tiny("llama-mha"))
    assert engine.progress.num_steps == 0
    engine.generate(prompts_of([9]), GREEDY)
    progress = engine.progress
    assert progress.num_steps == engine.stats.num_steps == 12
    assert progress.last_step_s > 0
    assert progress.idle_s >= 0


def test_a_cut_plan_has_what_its_rows_have() -> None:
    scheduler = Scheduler(SchedulerConfig(num_pages=64, page_size=16, token_budget=64, max_batch=8))
    scheduler.submit(Ask("a", range(5), max_tokens=4, num_samples=2))
    scheduler.submit(Ask("b", range(20), max_tokens=4))
    first = scheduler.plan()
    assert first is not None
    scheduler.submit(Ask("c", range(100, 130), max_tokens=4))
    plan = scheduler.plan()  # a's two samples and b decode from tokens on the device; c's prompt
    assert plan is not None
    assert plan.num_decode_rows == 3
    part, samples = cut(plan, [(1, 0, 1), (3, 10, 30)])
    assert part.keys == [plan.keys[1], plan.keys[3]]
    assert part.num_tokens == [1, 20]
    assert part.first_positions == [plan.first_positions[1], 10]
    assert part.num_decode_rows == 1
    assert part.token_ids == [plan.token_ids[1], *range(110, 130)]
    assert part.slots == [plan.slots[1], *plan.slots[13:]]
    assert (part.device_tokens, part.device_samples) == ([0], [plan.device_samples[1]])
    assert samples == [1, 3]
    assert part.logit_tokens == [0, 20]
    without_end, samples = cut(plan, [(3, 0, 10)])
    assert samples == without_end.logit_tokens == []
