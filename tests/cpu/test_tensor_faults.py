"""What goes wrong on one rank or on all: every rank takes the same way out, and nobody hangs."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from engines import assert_idle, assert_only_these_failed, prompts_of, tiny
from thread_ranks import ThreadedEngine, run_ranks

from ridgeline.engine import Sampling
from ridgeline.engine.execution.step_words import job_of, job_words, plan_of, step_words
from ridgeline.engine.execution.tensor_runner import AgreedGraphs, TensorRunner
from ridgeline.engine.sampling.extras import DeviceJob
from ridgeline.engine.scheduling.scheduler import Scheduler, SchedulerConfig
from ridgeline.engine.scheduling.state import Ask
from ridgeline.engine.scheduling.step_plan import StepPlan
from ridgeline.errors import HardwareError, OutOfMemoryError, UsageError
from ridgeline.parallel.inference.group import HEAD_WORDS, Group

GREEDY = Sampling(max_tokens=6)
POISON = 77
NUM_SUMS = 1 + 2 * 3  # of a pass of these models: the embedding, and two a layer


def poisoned_prompts() -> tuple[list[list[int]], list[int]]:
    """Prompts, and which of them hold the poison."""
    prompts = [
        [token for token in prompt if token != POISON] for prompt in prompts_of([9, 30, 14, 22])
    ]
    prompts[2][3] = POISON
    return prompts, [2]


def fail_after(runner: TensorRunner, num_sums: int, error: Callable[[], Exception]) -> list[int]:
    """Passes with the poison fail on this rank once that many sums are made; which they were."""
    forward, all_reduce, all_gather = (
        runner.forward,
        runner.group.all_reduce,
        runner.group.all_gather,
    )
    left: list[int | None] = [None]
    failed: list[int] = []

    def poisoned(inputs: Any, *rest: Any) -> torch.Tensor:
        bad = (inputs.ids == POISON) & (inputs.positions == 3)
        left[0] = num_sums if bad.any() else None
        return forward(inputs, *rest)

    def counted(call: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], Any]:
        def sum_or_fail(x: torch.Tensor) -> Any:
            if left[0] == 0:
                left[0] = None
                failed.append(len(x))
                raise error()
            left[0] = None if left[0] is None else left[0] - 1
            return call(x)

        return sum_or_fail

    runner.forward = poisoned  # type: ignore[method-assign]
    runner.group.all_reduce = counted(all_reduce)  # type: ignore[method-assign]
    runner.group.all_gather = counted(all_gather)  # type: ignore[method-assign]
    return failed


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("num_sums", [0, 1, 4, NUM_SUMS])
def test_a_pass_that_fails_on_one_rank_is_bisected_on_all(rank: int, num_sums: int) -> None:
    """At whichever of its sums that is, the logits' included."""
    prompts, wrong = poisoned_prompts()
    with ThreadedEngine(tiny("llama-mha")) as ranks:
        failed = fail_after(ranks.runners[rank], num_sums, lambda: RuntimeError("poison"))
        outputs = ranks.engine.generate(prompts, GREEDY)
        assert_idle(ranks.engine)
        assert len(failed) > 1  # whole, then in parts
        logs = [group.data.log for group in ranks.groups]  # type: ignore[attr-defined]
        assert logs[0] == logs[1]
        assert not any(future.done() for future in ranks.futures)
    assert_only_these_failed(outputs, prompts, GREEDY, wrong, "RuntimeError: poison")


@pytest.mark.parametrize("num_sums", [2, NUM_SUMS, NUM_SUMS + 1])
def test_prompt_logprobs_are_sums_too(num_sums: int) -> None:
    """A rank that fails still brings its part of the logits of prompts, 64 rows a time."""
    prompts, wrong = poisoned_prompts()
    (long,) = prompts_of([100])
    prompts[2] = prompts[2] + [token for token in long if token != POISON]
    sampling = Sampling(max_tokens=6, prompt_logprobs=0)
    with ThreadedEngine(tiny("llama-mha"), budget=128, num_pages=32) as ranks:
        failed = fail_after(ranks.runners[1], num_sums, lambda: RuntimeError("poison"))
        outputs = ranks.engine.generate(prompts, sampling)
        assert failed
        logs = [group.data.log for group in ranks.groups]  # type: ignore[attr-defined]
        assert logs[0] == logs[1]
    assert_only_these_failed(
        outputs, prompts, GREEDY, wrong, "RuntimeError: on rank 1: RuntimeError"
    )


@pytest.mark.parametrize("rank", [0, 1])
def test_memory_that_is_short_on_one_rank_fails_nobody(rank: int) -> None:
    prompts = prompts_of([9, 30, 14, 22])
    with ThreadedEngine(tiny("llama-mha")) as ranks:
        runner = ranks.runners[rank]
        forward = runner.forward

        def tight(inputs: Any, kind: Any, *rest: Any) -> torch.Tensor:
            if kind.shape.num_tokens > 20:
                raise torch.OutOfMemoryError("no memory left")
            return forward(inputs, kind, *rest)

        runner.forward = tight  # type: ignore[method-assign]
        outputs = ranks.engine.generate(prompts, GREEDY)
        assert ranks.engine.scheduler.token_budget < 64
    assert_only_these_failed(outputs, prompts, GREEDY, [])


def test_a_gather_without_memory_for_its_result_was_not_made() -> None:
    """It fails before the others are met, so that this rank still owes it to them."""
    prompts = prompts_of([9, 30])
    with ThreadedEngine(tiny("llama-mha")) as ranks:
        link = ranks.groups[1].data
        gather, failed = link.all_gather, []

        def tight(tensor: torch.Tensor) -> list[torch.Tensor]:
            if not failed:
                failed.append(len(tensor))
                raise torch.OutOfMemoryError("no memory left")
            return gather(tensor)

        link.all_gather = tight  # type: ignore[method-assign]
        outputs = ranks.engine.generate(prompts, GREEDY)
        assert failed
    assert_only_these_failed(outputs, prompts, GREEDY, [])


def test_an_error_outweighs_short_memory() -> None:
    """Two ranks that fail differently still raise alike, or they would run different parts."""
    prompts, wrong = poisoned_prompts()
    with ThreadedEngine(tiny("llama-mha")) as ranks:
        fail_after(ranks.runners[0], 2, lambda: torch.OutOfMemoryError("no memory left"))
        fail_after(ranks.runners[1], 3, lambda: RuntimeError("poison"))
        outputs = ranks.engine.generate(prompts, GREEDY)
    assert_only_these_failed(outputs, prompts, GREEDY, wrong, "on rank 1: RuntimeError: poison")


def test_a_request_that_rank_0_cannot_seat_fails_alone() -> None:
    prompts, wrong = poisoned_prompts()
    with ThreadedEngine(tiny("llama-mha")) as ranks:
        special = ranks.runners[0].sampler.special
        sit = special.sit

        def raising(seat: int, sampling: Sampling, prompt: Any, *rest: Any) -> None:
            if prompt == tuple(prompts[2]):
                raise ValueError("no table")
            sit(seat, sampling, prompt, *rest)

        special.sit = raising  # type: ignore[method-assign]
        outputs = ranks.engine.generate(prompts, GREEDY)
    assert_only_these_failed(outputs, prompts, GREEDY, wrong, "no table")


def test_nan_ends_its_own_request() -> None:
    prompts, wrong = poisoned_prompts()
    model = deepcopy(tiny("llama-mha"))
    with torch.no_grad():
        model.embed.weight[POISON] = float("nan")
    with ThreadedEngine(model) as ranks:
        assert_only_these_failed(
            ranks.engine.generate(prompts, GREEDY), prompts, GREEDY, wrong, "not numbers (NaN)"
        )
        clean = [[*prompt[:3], 50, *prompt[4:]] for prompt in prompts]
        assert_only_these_failed(ranks.engine.generate(clean, GREEDY), clean, GREEDY, [])


def test_tokens_are_rank_0s_whatever_another_chose() -> None:
    prompts = prompts_of([9, 30])
    with ThreadedEngine(tiny("llama-mha")) as ranks:
        other = ranks.runners[1]
        share = other.share_results

        def wrong(num_samples: int) -> None:
            other.buffers.results.fill_(3)
            share(num_samples)

        other.share_results = wrong  # type: ignore[method-assign]
        outputs = ranks.engine.generate(prompts, GREEDY)
    assert_only_these_failed(outputs, prompts, GREEDY, [])


def test_a_rank_that_goes_ends_the_engine_in_words(caplog: pytest.LogCaptureFixture) -> None:
    with ThreadedEngine(tiny("llama-mha")) as ranks:

        def dying(*_: Any) -> torch.Tensor:
            raise HardwareError("the device failed: CUDA error: gone")

        ranks.runners[1].forward = dying  # type: ignore[method-assign]
        with pytest.raises(HardwareError, match="lost a rank"):
            ranks.engine.generate(prompts_of([9]), GREEDY)
        assert "in parts" not in caplog.text  # no request is to blame
        with pytest.raises(HardwareError, match=r"left in its middle.*make a new engine"):
            ranks.engine.generate(prompts_of([9]), GREEDY)
        with pytest.raises(HardwareError, match="CUDA error"):
            ranks.futures[0].result(timeout=10)


def test_a_rank_that_cannot_even_take_part_goes() -> None:
    """Memory so short that there is none for zeros."""
    with ThreadedEngine(tiny("llama-mha")) as ranks:
        runner = ranks.runners[1]

        def full(*_: Any) -> torch.Tensor:
            runner.model.config = None  # type: ignore[assignment]
            raise torch.OutOfMemoryError("no memory left")

        runner.forward = full  # type: ignore[method-assign]
        with pytest.raises(HardwareError, match="lost a rank"):
            ranks.engine.generate(prompts_of([9]), GREEDY)


def test_a_step_that_is_interrupted_is_not_gone_on_with() -> None:
    with ThreadedEngine(tiny("llama-mha")) as ranks:

        def interrupted(*_: Any) -> torch.Tensor:
            ranks.groups[0].control.meeting.barrier.abort()  # type: ignore[attr-defined]
            ranks.groups[0].data.meeting.barrier.abort()  # type: ignore[attr-defined]
            raise KeyboardInterrupt

        ranks.runners[0].forward = interrupted  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            ranks.engine.generate(prompts_of([9]), GREEDY)
        with pytest.raises(HardwareError, match="KeyboardInterrupt"):
            ranks.engine.generate(prompts_of([9]), GREEDY)


def test_a_closed_engine_says_so() -> None:
    with ThreadedEngine(tiny("llama-mha")) as ranks:
        with ranks.engine as engine:
            assert engine.generate([[5]], GREEDY)[0].status == "finished"
        with pytest.raises(UsageError, match="engine is closed"):
            engine.generate([[5]], GREEDY)
        ranks.engine.close()  # again, without harm
        for future in ranks.futures:
            assert future.result(timeout=10) is None


class NoGraphs(AgreedGraphs):
    """Stands in for graphs, which a CPU has none of: it notes what would be captured."""

    def __init__(self, used_bytes: int) -> None:
        self.captured, self.used_bytes, self.budget_bytes = {}, used_bytes, 10
        self.by_hand = False

    def kind_for(self, *_: Any) -> None:
        if self._has_room():
            self.captured[len(self.captured)] = None  # type: ignore[index, assignment]


@pytest.mark.parametrize("used_bytes", [(0, 20), (20, 0)])
def test_rank_0_says_whether_there_is_room_for_graphs(used_bytes: tuple[int, int]) -> None:
    """And what one rank has captured in a pass that failed, none keeps."""
    prompts, _ = poisoned_prompts()
    with ThreadedEngine(tiny("llama-mha")) as ranks:
        graphs = [NoGraphs(used) for used in used_bytes]
        for rank in range(2):
            ranks.runners[rank].graphs = graphs[rank]
        ranks.engine.generate(prompts[:2], GREEDY)
        before = len(graphs[0].captured)
        assert (before > 0) == (used_bytes[0] < 10)
        assert graphs[0].captured == graphs[1].captured
        fail_after(ranks.runners[1], 0, lambda: RuntimeError("poison"))
        ranks.engine.generate(prompts[2:3], GREEDY)
        assert len(graphs[0].captured) == len(graphs[1].captured) == before


def test_all_ranks_leave_their_graphs_where_rank_0_is_traced() -> None:
    """Or one would replay sums that another launches."""
    with ThreadedEngine(tiny("llama-mha")) as ranks:
        graphs = [NoGraphs(20), NoGraphs(20)]
        for rank in range(2):
            ranks.runners[rank].graphs = graphs[rank]
        for yes in (True, False):
            graphs[0].by_hand = yes
            ranks.engine.generate([[5, 6]], GREEDY)
            assert [each.by_hand for each in graphs] == [yes, yes]


# --- what ranks tell each other -------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, HEAD_WORDS - 1, HEAD_WORDS, 3 * HEAD_WORDS])
def test_messages_of_any_length_arrive(count: int) -> None:
    words = [(-1) ** n * n << 20 for n in range(count)]

    def tell(group: Group) -> list[int] | None:
        return group.send(words) if group.rank == 0 else group.receive()

    assert run_ranks(3, tell)[1:] == [words, words]


def test_work_that_fails_on_one_rank_fails_on_all() -> None:
    def work(group: Group) -> str:
        def load() -> int:
            if group.rank == 1:
                raise OutOfMemoryError("needs 9 GiB, 8 are free")
            return 7

        try:
            return str(group.together(load))
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    told = "HardwareError: rank 1 of 3: needs 9 GiB, 8 are free"
    assert run_ranks(3, work) == [told, "OutOfMemoryError: needs 9 GiB, 8 are free", told]
    assert run_ranks(2, lambda group: group.together(lambda: group.rank)) == [0, 1]


def test_a_plan_survives_as_numbers() -> None:
    """All that a scheduler plans: prompts, samples that part ways, copies, tokens on the device."""
    scheduler = Scheduler(SchedulerConfig(num_pages=64, page_size=16, token_budget=64, max_batch=8))
    scheduler.submit(Ask("a", range(21), max_tokens=4, num_samples=2))
    scheduler.submit(Ask(("b", 2), range(20), max_tokens=4))
    plans = [scheduler.plan()]
    scheduler.submit(Ask("c", range(100, 130), max_tokens=4))
    plans.append(scheduler.plan())
    numbers = {"a": 4, ("b", 2): 9, "c": 2}
    ids = {number: request_id for request_id, number in numbers.items()}

    def named(plan: StepPlan) -> dict[str, Any]:
        found = {name: getattr(plan, name) for name in plan._fields}
        for name in ("keys", "sample_keys"):
            found[name] = [(ids[number], sample) for number, sample in found[name]]
        found["joined"] = [(seat, (ids[number], s)) for seat, (number, s) in found["joined"]]
        return found

    seen: set[str] = set()
    for plan in plans:
        assert plan is not None
        whole = {name: getattr(plan, name) for name in plan._fields}
        assert named(plan_of(step_words(plan, numbers))) == whole
        seen |= {name for name, value in whole.items() if value}
    assert {"copies", "device_tokens", "joined", "table_pages", "sample_keys"} <= seen


@pytest.mark.parametrize("pooling", [None, "last", "mean"])
@pytest.mark.parametrize("prompt_logprobs", [None, 0, 3])
def test_a_job_leads_to_the_same_passes(pooling: Any, prompt_logprobs: int | None) -> None:
    sampling = Sampling(temperature=0.7, seed=4, prompt_logprobs=prompt_logprobs)
    job = DeviceJob(sampling, tuple(range(9)), frozenset({1}), pooling)
    number, found = job_of(job_words(12, job))
    assert (number, len(found.prompt), found.pooling) == (12, 9, pooling)
    assert (found.sampling.prompt_logprobs is None) == (prompt_logprobs is None)
