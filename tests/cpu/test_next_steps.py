"""What a profile advises: changes that apply, the largest gain first."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_gains import BATCH_1, BF16, CONFIG, CPU, decode, situation
from test_rungs import RUNGS, all_offers

from ridgeline.kernels.cost import OpCost
from ridgeline.profiling.placing import judge_step, place
from ridgeline.profiling.predicting.next_steps import candidates, flags_of, what_next
from ridgeline.profiling.predicting.prediction import Situation
from ridgeline.profiling.tracing.division import Division, OpTime
from ridgeline.recipe import Recipe


@pytest.fixture(autouse=True)
def nothing_is_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path))


def edits(given: Any) -> list[dict[str, Any]]:
    return [edit for _, edit in candidates(given)]


def test_only_what_applies_is_considered() -> None:
    found = edits(situation(BF16, BATCH_1))
    assert {"scheme": "int8"} in found
    assert {"scheme": "fp8"} in found
    assert {"scheme": "int4-g128"} in found
    assert {"kv.dtype": "fp8"} in found
    assert not any("graphs" in edit or "dtype" in edit or "loop" in edit for edit in found)
    slow = edits(situation(Recipe(dtype="fp32", graphs=False, overlap=False), BATCH_1))
    assert slow[:3] == [{"dtype": "bf16"}, {"graphs": True}, {"overlap": True}]
    quantized = edits(situation(Recipe(dtype="bf16", scheme="int8"), BATCH_1, bytes_per_weight=1.1))
    assert not any("scheme" in edit for edit in quantized)
    assert {"copies": True} not in quantized  # the engine has decided about them, or will
    alone = Recipe(dtype="bf16", scheme="int8", copies=False)
    assert {"copies": True} in edits(situation(alone, BATCH_1, bytes_per_weight=1.1))
    inputs = Recipe(dtype="bf16", scheme="fp8", copies=False)
    assert {"copies": True} not in edits(situation(inputs, BATCH_1, bytes_per_weight=1.1))
    many = edits(situation(BF16, decode(32, 500, 6e-3)))
    assert not any("speculation.method" in edit for edit in many)


def test_on_a_cpu() -> None:
    found = edits(situation(Recipe(dtype="fp32"), decode(1, 100, 0.03), hardware=CPU))
    assert {"kernels": "fused"} in found
    assert {"scheme": "int4-g64"} in found  # groups of 128 do not fit
    assert not any(edit.get("scheme") == "fp8" or "graphs" in edit for edit in found)
    plain = situation(Recipe(dtype="fp32"), decode(1, 100, 0.03), hardware=CPU, loop="naive")
    assert edits(plain) == [{"loop": "engine", "kernels": "fused"}]


# Rungs that a profile does not advise, and why.
NOT_ADVISED = {
    "fused-bf16": "fused kernels and bf16 are advised one after the other",
    "engine": "for CPUs without a compiler, which a profile does not ask for",
    "fp16": "as large and as fast as bf16",
    "tf32": "for fp32 work, where bf16 is advised",
    "tuned": "on by default",
    "w8a8-int8": "int8 and fp8 are advised",
    "batching": "more requests at once are advised, in numbers",
    "larger-batch": "more requests at once are advised, in numbers",
    "more-tokens": "a profile has steps, and no queue of prompts",
    "fewer-tokens": "a profile has steps, and no queue of prompts",
    "pages-128": "nothing is predicted of it",
    "pages-32": "nothing is predicted of it",
    "prefix-cache": "on by default; and a profile's prompts share nothing",
    "draft-model": "a profile cannot name one",
}
# What a profile advises although no rung does it: a user asked for the one, and the ladder's engine
# has the other from its start.
NO_RUNG = [{"deterministic": False}, {"kernels": "fused"}]


def situations() -> list[Situation]:
    """Recipes that leave something to do, on a GPU and on a CPU."""
    slow = Recipe(dtype="fp32", graphs=False, overlap=False, deterministic=True)
    groups = replace(CONFIG, hidden_size=CONFIG.hidden_size + 32)  # that 32 divides and 64 does not
    return [
        situation(slow, BATCH_1),
        situation(slow, BATCH_1, loop="naive"),
        situation(BF16, BATCH_1),
        replace(situation(BF16, BATCH_1), config=groups),
        situation(replace(BF16, scheme="int8", copies=False), BATCH_1, bytes_per_weight=1.1),
        situation(Recipe(dtype="fp32"), decode(1, 100, 0.03), hardware=CPU),
    ]


def test_profiles_advise_what_the_ladder_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    offers = [(rung.name, offer.edit) for rung, _, offer in all_offers(monkeypatch)]
    advised = [edit for given in situations() for edit in edits(given)]
    by_rungs = {name for name, edit in offers if any(edit.items() <= e.items() for e in advised)}
    assert by_rungs == set(RUNGS) - set(NOT_ADVISED)
    others = [e for e in advised if not any(edit.items() <= e.items() for _, edit in offers)]
    assert [edit for edit in others if edit not in NO_RUNG] == []


def test_the_largest_gain_comes_first_and_small_ones_not_at_all() -> None:
    found = what_next(situation(BF16, BATCH_1))
    gains = [advice.prediction.speedup for advice in found]
    assert gains == sorted(gains, reverse=True)
    assert min(gains) >= 1.02
    titles = [advice.title for advice in found]
    assert titles[0].startswith("4 requests at once instead of 1")
    assert titles[1] == "weights in int4-g128"
    assert found[1].flags == "--scheme int4-g128"
    assert found[1].to_json()["speedup"] == found[1].prediction.speedup


def test_flags_as_they_are_typed() -> None:
    assert flags_of({"loop": "engine", "graphs": True, "kv.dtype": "fp8"}) == (
        "--loop engine --graphs --kv-dtype fp8"
    )
    assert flags_of({"overlap": False}) == "--no-overlap"


def _place(seconds: float, cost: OpCost | None) -> Any:
    return place(OpTime("x", "matrices", seconds, 1.0), cost, 1e-3, situation(BF16).hardware)


def test_ops_are_judged_by_the_ceiling_they_are_near() -> None:
    memory = _place(1e-4, OpCost(3.9e8, 0.0, 1e9, "bf16"))
    assert (memory.verdict, memory.share_of_step) == ("memory", pytest.approx(0.1))
    assert memory.share_of_ceiling == pytest.approx(3.9e12 / 4.38e12)
    compute = _place(1e-4, OpCost(1e6, 1e6, 7e10, "bf16"))
    assert compute.verdict == "compute"
    assert compute.share_of_ceiling == pytest.approx(7e14 / 8e14)
    assert _place(1e-4, OpCost(1e6, 0.0)).verdict == "overhead"
    assert _place(1e-4, None).verdict == "unknown"
    assert _place(0.0, OpCost(1e6, 0.0)).verdict == "unknown"


def test_steps_are_judged_by_their_waits_first() -> None:
    op = OpTime("x", "matrices", 0.5, 1.0)
    host = judge_step("decode", Division(1.0, (op,), 0.0, 0.1, 0.4, 1.0), 0.9, 0.1)
    assert (host.kind, host.sentence) == ("host", "decode waits for the host 40% of the time")
    gaps = judge_step("decode", Division(1.0, (op,), 0.0, 0.4, 0.1, 1.0), 0.9, 0.1)
    assert gaps.kind == "overhead"
    quiet = Division(1.0, (op,), 0.4, 0.1, 0.0, 1.0)
    assert judge_step("decode", quiet, 0.8, 0.1).kind == "memory"
    assert judge_step("prefill", quiet, 0.2, 0.7).kind == "compute"
    assert judge_step("decode", quiet, 0.1, 0.1).kind == "overhead"
    assert judge_step("decode", quiet, None, None).kind == "unknown"
