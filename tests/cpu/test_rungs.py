"""Which rungs apply where, and why not: on a made-up GPU and on a CPU, without either."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any, get_args

import pytest

from ridgeline.errors import UnsupportedError
from ridgeline.hardware import Ceiling, Hardware
from ridgeline.ladder import rungs
from ridgeline.ladder.outcome import Quality, RungOutcome
from ridgeline.ladder.rungs import STAGES, ClimbFacts, Offer, Rung, RungContext
from ridgeline.ladder.rungs.quantize import INT4
from ridgeline.ladder.state import applied, baseline
from ridgeline.models.shapes import describe_shape
from ridgeline.profiling.predicting.gains import AREAS, area_of
from ridgeline.profiling.predicting.prediction import Area
from ridgeline.recipe import edited_at_once, field_table

RUNGS = {rung.name: rung for stage in STAGES for rung in stage}
CPU = Hardware("intel", "cpu", "cpu", "some CPU", "x86_64", 8 << 30, 2, "6.1")
TF32 = {"matrix_tf32": Ceiling(4e14, "FLOP/s", "datasheet")}
GPU = Hardware(
    "nvidia", "cuda", "cuda:0", "some GPU", "sm_90", 80 << 30, 132, "580", datasheet=TF32
)
CONFIG = describe_shape("llama-3.1-8b").config


def place(hardware: Hardware = GPU, *edits: Mapping[str, Any], **more: Any) -> RungContext:
    state = baseline(hardware.device)
    for edit in edits:
        state = applied(state, edit)
    filled = edited_at_once(
        state.recipe, {"limits.max_batch": state.recipe.limits.max_batch or 512}
    )
    filled = edited_at_once(
        filled,
        {"limits.token_budget": 8192, "limits.max_context": 4096, "limits.memory_share": 0.9},
    )
    outcomes = more.pop("outcomes", {})
    facts = ClimbFacts(
        **{"config": CONFIG, "goal": "latency", "setting": ""} | more, hardware=hardware
    )
    return RungContext(facts, state, filled, outcomes)


ENGINE = {"loop": "engine", "kernels": "fused"}
BF16 = {"dtype": "bf16"}


def offered(name: str, where: RungContext) -> dict[str, Any]:
    offer = RUNGS[name].offer(where)
    assert isinstance(offer, Offer), offer
    return dict(offer.edit)


def refused(name: str, where: RungContext) -> str:
    reason = RUNGS[name].offer(where)
    assert isinstance(reason, str), reason
    return reason


def outside_bound(*names: str, kl: float = 0.05) -> dict[str, RungOutcome]:
    """Schemes that were measured, with answers outside the quality bound."""
    quality = Quality(kl, None, None, 0.1, None, None, 10, "mean KL is too much")
    return {
        name: RungOutcome(name, "quantize", "", {}, "dropped", "", quality=quality)
        for name in names
    }


def contexts() -> list[RungContext]:
    """Places on the way up from the baseline, where between them every rung is offered."""
    traffic = {"concurrency": 1024, "prefix_share": 0.5, "has_text": True, "longest_prompt": 1024}
    result = [place(), place(CPU)]
    for hardware in (GPU, replace(GPU, architecture="sm_75"), CPU):
        fused = offered("fused", place(hardware, **traffic))
        for edits in ((ENGINE,), (fused,), (ENGINE, BF16), (ENGINE, BF16, {"scheme": "int8"})):
            result.append(place(hardware, *edits, **traffic, draft_model="small"))
            for count in range(1, len(INT4)):
                outcomes = outside_bound(*INT4[:count])
                result.append(place(hardware, *edits, outcomes=outcomes))
    return result


def all_offers(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Rung, RungContext, Offer]]:
    """By every rung from each of those places, where the device could run all of them."""
    monkeypatch.setattr("ridgeline.ladder.rungs.quantize.check_runs", lambda *_: None)
    monkeypatch.setattr("ridgeline.ladder.rungs.custom_kernels.find_nvcc", lambda: "nvcc")
    pairs = [(rung, where, rung.offer(where)) for rung in RUNGS.values() for where in contexts()]
    return [(rung, where, offer) for rung, where, offer in pairs if isinstance(offer, Offer)]


def test_every_rung_is_offered_somewhere_and_changes_something(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A switch that is on by default must be off in the baseline: its rung would change nothing."""
    offers = all_offers(monkeypatch)
    assert {rung.name for rung, _, _ in offers} == set(RUNGS)
    for rung, where, offer in offers:
        assert applied(where.state, offer.edit) != where.state, rung.name
        assert offer.reason


def test_a_rung_is_of_the_area_that_its_edit_is_predicted_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for rung, _, offer in all_offers(monkeypatch):
        edit = {name: value for name, value in offer.edit.items() if name != "folder"}
        assert area_of(edit) == rung.area, rung.name


def test_every_field_of_a_recipe_is_in_one_area() -> None:
    names = [name for area in AREAS.values() for name in area]
    assert len(names) == len(set(names))
    assert set(names) == {"loop", *field_table()}
    assert tuple(AREAS) == get_args(Area)


def test_every_rung_that_is_written_is_climbed_and_documented() -> None:
    """A tuple of rungs that STAGES does not list would never be tried."""
    files = [
        import_module(f"ridgeline.ladder.rungs.{file.stem}")
        for file in Path(rungs.__file__).parent.glob("*.py")
    ]
    written = {
        rung.name
        for file in files
        for value in vars(file).values()
        for rung in (value if isinstance(value, tuple) else (value,))
        if isinstance(rung, Rung)
    }
    assert written == set(RUNGS)
    table = (Path(__file__).parents[2] / "docs" / "ladder.md").read_text()
    table = table.replace("`-g64`, `-g32`", "`int4-g64`, `int4-g32`")
    assert [name for name in RUNGS if f"`{name}`" not in table] == []


def test_names_are_their_own() -> None:
    names = [rung.name for stage in STAGES for rung in stage]
    assert len(names) == len(set(names))


def test_the_engine_takes_one_request_at_a_time_until_batching_is_measured() -> None:
    alone = offered("fused", place())
    assert alone == {"loop": "engine", "kernels": "fused"}
    many = offered("fused", place(concurrency=64, prefix_share=0.4))
    assert many["limits.max_batch"] == 1
    assert many["kv.prefix_cache"] is False
    assert offered("batching", place(GPU, many, concurrency=64)) == {"limits.max_batch": 512}
    assert "one after the other" in refused("batching", place(GPU, ENGINE))
    assert offered("prefix-cache", place(GPU, many, prefix_share=0.4)) == {"kv.prefix_cache": True}


def test_dtypes_exclude_each_other_and_tf32_goes() -> None:
    fp32 = place(GPU, ENGINE)
    assert offered("bf16", fp32) == BF16
    assert offered("tf32", fp32) == {"tf32": True}
    assert offered("bf16", place(GPU, ENGINE, {"tf32": True})) == BF16 | {"tf32": False}
    assert "bf16" in refused("tf32", place(GPU, ENGINE, BF16))
    assert "same size" in refused("fp16", place(GPU, ENGINE, BF16))
    old = replace(GPU, architecture="sm_75")
    assert "sm_75" in refused("bf16", place(old, ENGINE))
    assert offered("fp16", place(old, ENGINE)) == {"dtype": "fp16"}


def test_alignment_is_named() -> None:
    offer = RUNGS["bf16"].offer(place(GPU, ENGINE))
    assert isinstance(offer, Offer)
    assert "8 divides" in offer.reason
    odd = replace(CONFIG, mlp_size=1001)
    offer = RUNGS["bf16"].offer(place(GPU, ENGINE, config=odd))
    assert isinstance(offer, Offer)
    assert "1001" in offer.reason


@pytest.mark.parametrize("name", ["graphs", "overlap", "tf32", "fp16", "tuned", "fp8", "kv-fp8"])
def test_what_a_cpu_has_not(name: str) -> None:
    assert refused(name, place(CPU, ENGINE))


def test_schemes_that_the_device_cannot_run_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise UnsupportedError("no fp8 here")

    monkeypatch.setattr("ridgeline.ladder.rungs.quantize.check_runs", refuse)
    assert refused("fp8", place(GPU, ENGINE, BF16)) == "no fp8 here"


def test_finer_groups_are_for_where_coarser_ones_did_not_do() -> None:
    assert offered("int4-g128", place(CPU, ENGINE)) == {"scheme": "int4-g128"}
    assert "int4-g128 fits" in refused("int4-g64", place(CPU, ENGINE))

    def after(name: str, kl: float) -> RungContext:
        return place(CPU, ENGINE, outcomes=outside_bound(name, kl=kl))

    assert offered("int4-g64", after("int4-g128", 0.05)) == {"scheme": "int4-g64"}
    assert "far outside" in refused("int4-g64", after("int4-g128", 0.5))
    assert "finer" in refused("int4-g128", after("int4-g64", 0.05))


def test_a_gpu_that_cannot_fuse_fp32_goes_on_in_bf16() -> None:
    assert offered("fused-bf16", place()) == ENGINE | BF16
    assert "already" in refused("fused-bf16", place(GPU, ENGINE))


def test_a_quantized_checkpoint_is_not_quantized_again() -> None:
    assert "already" in refused("int8", place(CPU, ENGINE, is_quantized=True))


def test_the_head_is_for_recipes_that_have_it_plain() -> None:
    int8 = {"head": "int8"}
    assert offered("head-int8", place(CPU, ENGINE)) == int8
    assert offered("head-int8", place(CPU, ENGINE, is_quantized=True)) == int8  # the head is not
    assert "already" in refused("head-int8", place(CPU, ENGINE, int8))
    assert "deterministic" in refused("head-int8", place(CPU, ENGINE, {"deterministic": True}))
    assert "fp32" in refused("head-int8", place(GPU, ENGINE))
    assert RUNGS["head-int8"].changes_answers
    stages = [{rung.name for rung in stage} for stage in STAGES]
    schemes = next(number for number, names in enumerate(stages) if "int4-g128" in names)
    assert stages[schemes + 1] == {"head-int8"}


def test_copies_are_for_weights_that_are_codes_where_there_is_room() -> None:
    int4 = {"scheme": "int4-g128", "dtype": "bf16"}
    assert offered("copies", place(GPU, ENGINE, int4)) == {"copies": True}
    assert "already" in refused("copies", place(GPU, ENGINE, int4, {"copies": True}))
    assert "no weights" in refused("copies", place(GPU, ENGINE, BF16))
    assert "no weights" in refused("copies", place(GPU, ENGINE, BF16, {"scheme": "fp8"}))
    assert "CPU" in refused("copies", place(CPU, ENGINE, int4))
    assert "own codes" in refused("copies", place(GPU, ENGINE, BF16, is_quantized=True))
    assert "deterministic" in refused("copies", place(GPU, ENGINE, int4, {"deterministic": True}))
    small = replace(GPU, memory_bytes=24 << 30)
    assert "54% of the memory" in refused("copies", place(small, ENGINE, int4))
    kept = {"int4-g128": RungOutcome("int4-g128", "quantize", "", {}, "kept", "")}
    calibrated = place(GPU, ENGINE, BF16, {"folder": "codes"}, outcomes=kept)
    assert offered("copies", calibrated) == {"copies": True}


def test_another_scheme_leaves_calibrated_codes() -> None:
    where = place(CPU, ENGINE, {"folder": "codes"})
    assert offered("int8", where) == {"scheme": "int8", "folder": None}


def test_drafting_is_for_real_text_alone() -> None:
    lookup = {"speculation.method": "prompt-lookup"}
    assert offered("prompt-lookup", place(GPU, ENGINE, has_text=True)) == lookup
    assert "not text" in refused("prompt-lookup", place(GPU, ENGINE))
    random = place(GPU, ENGINE, has_text=True, has_random_weights=True)
    assert "random" in refused("prompt-lookup", random)


def test_a_draft_model_is_tried_where_one_was_named() -> None:
    named = {"has_text": True, "draft_model": "small"}
    edit = {"speculation.method": "draft", "speculation.draft_model": "small"}
    assert offered("draft-model", place(GPU, ENGINE, **named)) == edit
    looking = {"speculation.method": "prompt-lookup"}
    assert offered("draft-model", place(GPU, ENGINE, looking, **named)) == edit
    assert "already" in refused("draft-model", place(GPU, ENGINE, edit, **named))
    assert "--draft-model" in refused("draft-model", place(GPU, ENGINE, has_text=True))
    assert "not text" in refused("draft-model", place(GPU, ENGINE, draft_model="small"))


def test_tuned_kernels_need_choices_or_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    where = "ridgeline.ladder.rungs.custom_kernels"
    monkeypatch.setattr(f"{where}.autotune.load", lambda name: {})
    monkeypatch.setattr(f"{where}.find_nvcc", lambda: None)
    assert "kernels tune" in refused("tuned", place(GPU, ENGINE))
    monkeypatch.setattr(f"{where}.find_nvcc", lambda: "/usr/bin/nvcc")
    assert offered("tuned", place(GPU, ENGINE)) == {"tuned": True}


def test_token_budgets_matter_where_prompts_do_not_fit_one_step() -> None:
    assert "a step takes 8192" in refused("more-tokens", place(GPU, ENGINE, longest_prompt=128))
    many = place(GPU, ENGINE, longest_prompt=1024, concurrency=512)
    assert offered("more-tokens", many) == {"limits.token_budget": 16384}
    assert offered("fewer-tokens", many) == {"limits.token_budget": 4096}


def test_rungs_are_where_their_area_is() -> None:
    order = ["fuse", "overhead", "tensor cores", "custom kernels", "quantize", "batch and memory"]
    firsts: list[Rung] = [stage[0] for stage in STAGES if stage[0].name != "batching"]
    places = [order.index(rung.area) for rung in firsts]
    assert places == sorted(places)


def test_only_of_four_bits_quality_is_in_doubt_before() -> None:
    assert {rung.name for rung in RUNGS.values() if rung.chance < 1} == set(INT4)
