"""Recipes: what is wrong is refused by name, what is saved is read back, "auto" is filled in."""

from __future__ import annotations

import json
from dataclasses import FrozenInstanceError, fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ridgeline.errors import ContextLengthError, OutputError, UsageError
from ridgeline.formats.fields import dotted_fields
from ridgeline.models import LayerConfig, ModelConfig
from ridgeline.recipe import (
    KV,
    VERSION,
    Limits,
    Parallel,
    Recipe,
    Speculation,
    edited,
    flag,
    recipe_from,
    with_auto,
)

pytestmark = pytest.mark.smoke

MODEL = ModelConfig("llama", 100, 64, 4, 2, 16, 128, 4096, (LayerConfig(None, None),))
UNUSUAL = Recipe(
    dtype="fp16",
    kernels="reference",
    graphs=False,
    scheme="int4-g128",
    blocks=False,
    head="int8",
    quantize_all=True,
    copies=True,
    tf32=True,
    tuned=False,
    tiles="rms_norm=2",
    deterministic=True,
    overlap=False,
    kv=KV("int8", 128, False),
    limits=Limits(1000, 7, 77, 64, 0.25),
    speculation=Speculation("draft", 3, 5, 1, "org/small"),
    parallel=Parallel(4, 4, 2),
)


@pytest.mark.parametrize(
    ("make", "wrong", "says"),
    [
        (Recipe, {"dtype": "int8"}, "dtype is 'int8'; give one of auto, bf16, fp16, fp32"),
        (Recipe, {"kernels": "fuse"}, "did you mean 'fused'"),
        (Recipe, {"graphs": 1}, "graphs is 1; give true or false"),
        (Recipe, {"overlap": 0}, "overlap is 0; give true or false"),
        (Recipe, {"scheme": "INT4"}, "try int4-g128"),
        (Recipe, {"scheme": "int4-"}, "try int4-g128"),
        (Recipe, {"kv": None}, "kv is None; give a KV"),
        (KV, {"dtype": "fp4"}, "kv_dtype is 'fp4'"),
        (KV, {"page_size": 48}, "page_size is 48; allowed are 16, 32, 64, 128, 256; try 32"),
        (KV, {"page_size": 16.0}, "page_size is 16.0; give a whole number of at least 1"),
        (Limits, {"max_context": 0}, "max_context is 0; give a whole number of at least 1"),
        (Limits, {"max_batch": True}, "max_batch is True"),
        (Limits, {"max_graph_batch": 2049}, "from 1 to 2048"),
        (Limits, {"memory_share": 0.0}, "memory_share is 0.0; give a number from 0.01 to 1.0"),
        (Limits, {"memory_share": float("nan")}, "memory_share is nan"),
        (Limits, {"max_batch": 64, "token_budget": 63}, "token_budget of at least 64"),
        (Speculation, {"method": "lookup"}, "speculation is 'lookup'"),
        (Speculation, {"method": "draft"}, "no draft_model"),
        (Speculation, {"draft_model": "x"}, "draft_model is 'x' and speculation none"),
        (Speculation, {"min_ngram": 5}, "min_ngram is 5 and max_ngram 4"),
        (Speculation, {"max_draft_tokens": 0}, "max_draft_tokens is 0"),
        (Parallel, {"tensor": 0}, "tensor_parallel is 0"),
    ],
)
def test_wrong_values_are_refused(make: Any, wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError) as caught:
        make(**wrong)
    assert says in str(caught.value)


def test_every_field_has_a_meaning_and_a_flag_of_its_own() -> None:
    table = dotted_fields(Recipe)
    assert all(entry.metadata["help"] for entry in table.values())
    flags = [flag(name) for name in table]
    assert len(set(flags)) == len(flags)
    assert flag("kv.dtype") == "--kv-dtype"
    assert flag("limits.max_context") == "--max-context"


def test_a_recipe_cannot_be_changed_in_place() -> None:
    with pytest.raises(FrozenInstanceError):
        Recipe().kv.page_size = 16  # type: ignore[misc]


@pytest.mark.parametrize("recipe", [Recipe(), UNUSUAL])
def test_what_is_saved_is_read_back(recipe: Recipe, tmp_path: Path) -> None:
    path = recipe.save(tmp_path / "new" / "folder")
    assert path.name == "recipe.json"
    assert Recipe.load(path) == Recipe.load(path.parent) == recipe
    assert json.loads(path.read_text())["version"] == VERSION
    assert recipe != (UNUSUAL if recipe == Recipe() else Recipe())


def test_the_unusual_recipe_is_unusual_everywhere() -> None:
    """So that a field which is not saved would be noticed above."""
    for name, entry in dotted_fields(Recipe).items():
        owner: Any = getattr(UNUSUAL, name.split(".")[0]) if "." in name else UNUSUAL
        assert getattr(owner, entry.name) != entry.default, name


def test_fields_left_out_keep_their_defaults() -> None:
    assert recipe_from({"version": VERSION, "kv": {"dtype": "fp8"}}) == Recipe(kv=KV("fp8"))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "is not JSON"),
        ("[]", "expected an object"),
        ("{}", "version None; this Ridgeline reads version 1"),
        ('{"version": 2}', "version 2;"),
        ('{"version": 1, "speculatoin": {}}', "did you mean 'speculation'"),
        ('{"version": 1, "kv": {"dtyp": "fp8"}}', "kv has an unknown key 'dtyp'; did you mean"),
        ('{"version": 1, "kv": 3}', "kv is '3'; expected an object"),
        (
            '{"version": 1, "limits": {"max_batch": "12"}}',
            "limits: max_batch is '12'; give a whole",
        ),
        ('{"version": 1, "graphs": "yes"}', "graphs is 'yes'; give true or false"),
    ],
)
def test_a_wrong_file_is_refused_by_name(content: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "recipe.json").write_text(content)
    with pytest.raises(UsageError) as caught:
        Recipe.load(tmp_path)
    assert "recipe.json" in str(caught.value)
    assert says in str(caught.value)


def test_a_file_that_is_not_there_or_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        Recipe.load(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="file"):
        Recipe().save(tmp_path / "file")


def test_edits_make_new_recipes() -> None:
    base = Recipe()
    assert edited(base, "scheme", "fp8") == replace(base, scheme="fp8")
    changed = edited(edited(base, "kv.dtype", "fp8"), "limits.max_batch", 9)
    assert changed == Recipe(kv=KV("fp8"), limits=Limits(max_batch=9))
    assert base == Recipe()
    with pytest.raises(UsageError, match=r"did you mean 'kv\.dtype'"):
        edited(base, "kv.dtyp", "fp8")
    with pytest.raises(UsageError, match="unknown key 'kv'"):
        edited(base, "kv", KV())
    with pytest.raises(UsageError, match="kv_dtype is 'fp9'"):
        edited(base, "kv.dtype", "fp9")


def test_auto_is_filled_in_by_device_and_model() -> None:
    on_gpu = with_auto(Recipe(), MODEL, torch.bfloat16, "cuda:0")
    assert (on_gpu.dtype, on_gpu.kv.dtype, on_gpu.kernels) == ("bf16", "bf16", "fused")
    assert (on_gpu.graphs, on_gpu.overlap) == (True, True)
    assert on_gpu.limits == Limits(4096, 512, 8192, 2048, 0.9)
    on_cpu = with_auto(Recipe(), MODEL, torch.float32, "cpu")
    assert (on_cpu.dtype, on_cpu.kv.dtype, on_cpu.kernels) == ("fp32", "fp32", "reference")
    assert (on_cpu.graphs, on_cpu.overlap) == (False, False)
    assert on_cpu.limits == Limits(4096, 128, 512, 2048, 0.5)


def test_auto_leaves_nothing_open_and_changes_nothing_given() -> None:
    assert with_auto(UNUSUAL, MODEL, torch.float32, "cuda:0") == UNUSUAL
    filled = with_auto(Recipe(), MODEL, torch.bfloat16, "cuda:0")
    limits = {entry.name: getattr(filled.limits, entry.name) for entry in fields(Limits)}
    assert None not in limits.values()
    assert filled.limits.filled()._asdict() == limits
    with pytest.raises(AssertionError, match="with_auto comes first"):
        Limits().filled()
    assert with_auto(filled, MODEL, torch.float32, "cuda:0") == filled


@pytest.mark.parametrize(
    ("given", "batch", "budget"),
    [
        (Limits(max_batch=1000), 1000, 1000),
        (Limits(token_budget=100), 100, 100),
        (Limits(token_budget=300), 128, 300),
        (Limits(max_batch=3, token_budget=4), 3, 4),
    ],
)
def test_batch_and_budget_follow_each_other(given: Limits, batch: int, budget: int) -> None:
    limits = with_auto(Recipe(limits=given), MODEL, torch.float32, "cpu").limits
    assert (limits.max_batch, limits.token_budget) == (batch, budget)


def test_what_needs_a_gpu_is_refused_on_a_cpu() -> None:
    with pytest.raises(UsageError, match="needs a GPU"):
        with_auto(Recipe(graphs=True), MODEL, torch.float32, "cpu")


def test_a_context_beyond_the_model_is_refused() -> None:
    recipe = Recipe(limits=Limits(max_context=4097))
    with pytest.raises(ContextLengthError, match="max_context is 4097; the model reaches 4096"):
        with_auto(recipe, MODEL, torch.float32, "cpu")
