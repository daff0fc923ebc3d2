"""The memory plan: each item against what is really allocated, and remedies against the plan that
follows them.

What the model allocates is read from torch's CPU allocator (allocations.py). The CPU runs the
references; for a GPU, where every op allocates its results only, ops that do just that stand in.
"""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from allocations import allocations
from torch import Tensor

from ridgeline.engine.execution.forward import ForwardPass
from ridgeline.engine.memory.activations import peak
from ridgeline.engine.memory.footprint import (
    GRAPH_POOL_BYTES,
    NUM_GRAPHS,
    bytes_per_page,
    driver_bytes,
    expanded_bytes,
    logit_bytes,
    weight_bytes,
)
from ridgeline.engine.memory.plan import MemoryPlan, fitted, itemise, plan_memory
from ridgeline.engine.steps.rope_tables import RopeTables
from ridgeline.errors import OutOfMemoryError, UsageError
from ridgeline.formats.dtypes import parse_dtype
from ridgeline.kernels.attention import AttentionSpec
from ridgeline.kernels.pages import PageTables, make_pages, write_tokens
from ridgeline.kernels.prefill_attention import Packing, prefill_attention
from ridgeline.models import ModelConfig, Transformer, build_model, fill_random, transformer
from ridgeline.models.families import describe_hf
from ridgeline.models.shapes import SHAPES, describe_shape
from ridgeline.parallel.degrees import rank_config
from ridgeline.recipe import (
    KV,
    Limits,
    Parallel,
    Recipe,
    Speculation,
    edited,
    field_table,
    flag,
    with_auto,
)

GIB = 2**30
SMALL: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "vocab_size": 3000,
    "max_position_embeddings": 4096,
}
# Two experts that all tokens go through: the worst case that the plan counts with.
EXPERTS = {"num_experts": 2, "num_local_experts": 2, "num_experts_per_tok": 2}
FAMILIES = ["llama-3.1-8b", "qwen2.5-7b", "qwen3-8b", "gemma-2-9b", "gemma-3-1b", "smollm3-3b",
            "phi-4", "granite-3.1-8b", "qwen3-30b-a3b", "mixtral-8x7b"]  # fmt: skip


def small_config(name: str, **changes: Any) -> ModelConfig:
    """A named shape's features in a size that a test can run."""
    values = SHAPES[name]
    experts = EXPERTS | {"moe_intermediate_size": 512} if "num_experts_per_tok" in values else {}
    return describe_hf(values | SMALL | experts | changes).config


def test_every_family_with_a_shape_is_planned() -> None:
    shaped = {tuple(values["architectures"]) for values in SHAPES.values()}
    planned = {tuple(SHAPES[name]["architectures"]) for name in FAMILIES}
    assert shaped - planned == {("MistralForCausalLM",)}  # which differs from Llama by a window


def recipe_for(config: ModelConfig, device: str = "cuda:0", **changes: Any) -> Recipe:
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    return with_auto(Recipe(**changes), config, dtype, device)


class PagedSequence:
    """One sequence whose keys and values lie in pages, as the model asks for it."""

    def __init__(self, config: ModelConfig, dtype: str, num_pages: int, page_size: int) -> None:
        about = (num_pages, page_size, config.num_kv_heads, config.head_dim, parse_dtype(dtype))
        self.layers = [make_pages(*about, "cpu") for _ in config.layers]
        self.page_table = torch.arange(num_pages, dtype=torch.int32).unsqueeze(0)

    def begin(self, past: int, new: int) -> None:
        self.positions_T = torch.arange(past, past + new)
        self.lengths_T = self.positions_T + 1
        self.starts, self.lengths_B = torch.tensor([0, new]), torch.tensor([past + new])

    def attend(
        self, layer: int, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, spec: AttentionSpec
    ) -> Tensor:
        k_pages, v_pages, k_scale, v_scale = self.layers[layer]
        write_tokens(k_pages, self.positions_T, k_TKH, k_scale)
        write_tokens(v_pages, self.positions_T, v_TKH, v_scale)
        tables = PageTables(self.page_table, self.lengths_B)
        return prefill_attention(q_TNH, Packing(self.starts), self.layers[layer], tables, spec)


def forward_peak(model: Transformer, new: int, past: int, dtype: str) -> int:
    sequence = PagedSequence(model.config, dtype, -(-(past + new) // 64), 64)
    sequence.begin(past, new)
    tokens = torch.randint(0, model.config.vocab_size, (new,))
    with torch.inference_mode():
        return allocations(lambda: model(tokens, sequence)).peak_bytes


@pytest.mark.sweep(keep=7)
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_activations_are_what_the_references_allocate(name: str, dtype: str) -> None:
    config = small_config(name)
    model = fill_random(build_model(config, parse_dtype(dtype), "cpu"))
    for new, past in ((256, 0), (64, 700), (48, 0)):
        planned = peak(config, dtype, "reference", num_tokens=new, num_keys=new + past)
        used = forward_peak(model, new, past, dtype)
        assert planned.num_bytes == pytest.approx(used, rel=0.02), (planned, new, past)


@pytest.mark.parametrize(
    ("changes", "num_keys", "name"),
    [
        ({}, 700, "attention"),
        ({}, 64, "MLP"),
        ({"intermediate_size": 64, "hidden_size": 4096}, 8, "norm"),
    ],
)
def test_the_largest_moment_moves_with_the_shape(
    changes: dict[str, Any], num_keys: int, name: str
) -> None:
    """So that the comparison above was not of one moment only."""
    config = small_config("llama-3.1-8b", **changes)
    assert peak(config, "bf16", "reference", num_tokens=64, num_keys=num_keys).name == name


class ResultsOnly:
    """Stand-ins for the GPU's ops: each allocates its results and computes nothing."""

    def __init__(self, num_tokens: int) -> None:
        self.positions_T = self.lengths_T = torch.arange(num_tokens)

    @staticmethod
    def attend(layer: int, q_TNH: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        return q_TNH.new_empty(q_TNH.shape)

    @staticmethod
    def like_input(x: Tensor, *_: Any) -> Tensor:
        return x.new_empty(x.shape)

    @staticmethod
    def gated(gate_up_T2F: Tensor, activation: str) -> Tensor:
        return gate_up_T2F.new_empty(len(gate_up_T2F), gate_up_T2F.shape[1] // 2)

    @staticmethod
    def route(logits_TE: Tensor, chosen: int, renormalize: bool) -> tuple[Tensor, Tensor]:
        shape = (len(logits_TE), chosen)
        return torch.empty(shape), torch.empty(shape, dtype=torch.int64)

    @staticmethod
    def experts(x: Tensor, weights: Tensor, ids: Tensor, gate_up: Tensor, *_: Any) -> Tensor:
        """What kernels/moe's launcher allocates, its few integers aside."""
        hidden = x.new_empty(ids.numel(), gate_up.shape[1] // 2)
        slots = x.new_empty(ids.numel(), x.shape[1])
        out = x.new_empty(x.shape)
        del hidden, slots
        return out


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("mlp_size", [64, 1024])
def test_fused_activations_are_the_results_of_the_ops(
    name: str, mlp_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_config(name, intermediate_size=mlp_size, moe_intermediate_size=mlp_size)
    # In fp32, because the CPU's bf16 products take scratch of their own.
    model = build_model(config, torch.float32, "cpu")
    for op, instead in (
        ("rms_norm", ResultsOnly.like_input),
        ("rotate", ResultsOnly.like_input),
        ("gated_activation", ResultsOnly.gated),
        ("route", ResultsOnly.route),
        ("mixture_of_experts", ResultsOnly.experts),
    ):
        monkeypatch.setattr(transformer, op, instead)
    tokens = torch.zeros(96, dtype=torch.int64)
    with torch.inference_mode():
        used = allocations(lambda: model(tokens, ResultsOnly(96))).peak_bytes
    planned = peak(config, "fp32", "fused", num_tokens=96, num_keys=96)
    assert planned.num_bytes == pytest.approx(used, rel=0.02), planned


@pytest.mark.parametrize("name", ["llama-3.1-8b", "gemma-2-9b", "granite-3.1-8b"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.filterwarnings("ignore:TF32 acceleration")  # of oneDNN's switch, on chips it has not
def test_logits_are_what_the_head_allocates(name: str, dtype: str, device: str) -> None:
    """As the runner asks for them on either device, without oneDNN: its scratch is another item."""
    config = small_config(name)
    model = fill_random(build_model(config, parse_dtype(dtype), "cpu"))
    recipe = with_auto(Recipe(), config, parse_dtype(dtype), device)
    forward: Any = SimpleNamespace(model=model, device=torch.device(device))
    hidden_TD = torch.randn(200, config.hidden_size, dtype=parse_dtype(dtype))
    rows = torch.arange(0, 200, 5)
    with torch.inference_mode(), torch.backends.mkldnn.flags(enabled=False):
        used = allocations(lambda: ForwardPass.logits(forward, hidden_TD[rows])).peak_bytes
    assert logit_bytes(config, recipe, len(rows)) == pytest.approx(used, rel=0.02)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_weights_are_what_the_model_holds(name: str, dtype: str) -> None:
    config = small_config(name)
    model = build_model(config, parse_dtype(dtype), "meta")
    assert weight_bytes(config, dtype) == sum(p.nbytes for p in model.parameters())


def test_the_8b_shape_reads_what_was_published() -> None:
    """Layers 6.98 G parameters, head 0.525 G: int4 layers and a bf16 head are 4.7 GB to read."""
    config = describe_shape("llama-3.1-8b").config
    embedding = 2 * config.vocab_size * config.hidden_size
    assert (weight_bytes(config, "bf16") - embedding) / 1e9 == pytest.approx(15.0, abs=0.05)
    assert (weight_bytes(config, "bf16", "fp8") - embedding) / 1e9 == pytest.approx(8.03, abs=0.03)
    int4 = weight_bytes(config, "bf16", "int4-g128") - embedding
    assert int4 / 1e9 == pytest.approx(4.7, abs=0.1)
    page = bytes_per_page(config, recipe_for(config))
    assert page == 131_072 * 64


@pytest.mark.parametrize("scheme", ["gptq", "int5", "int4-g0", "int"])
def test_a_scheme_of_unknown_size_is_refused(scheme: str) -> None:
    with pytest.raises(UsageError, match=f"scheme '{scheme}'"):
        weight_bytes(small_config("llama-3.1-8b"), "bf16", scheme)


def test_a_matrix_on_its_way_back_is_planned_for() -> None:
    config = small_config("llama-3.1-8b")
    largest = 2 * config.mlp_size * config.hidden_size
    on_cpu = recipe_for(config, "cpu", scheme="int8")
    assert expanded_bytes(config, edited(on_cpu, "kernels", "fused")) == 4 * largest
    assert expanded_bytes(config, recipe_for(config, scheme="int4-g128")) == 2 * largest
    assert expanded_bytes(config, recipe_for(config, scheme="fp8")) == 0
    assert expanded_bytes(config, recipe_for(config)) == 0
    plan = itemise(config, on_cpu, GIB)
    assert plan.bytes_of("expanded weight") == 16 * largest  # what the reference writes out


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16", "fp8", "int8"])
def test_pages_are_what_is_allocated(dtype: Any) -> None:
    config = small_config("qwen2.5-7b")
    sequence = PagedSequence(config, dtype, num_pages=5, page_size=32)
    used = sum(part.nbytes for layer in sequence.layers for part in layer if part is not None)
    recipe = recipe_for(config, kv=KV(dtype, page_size=32))
    assert 5 * bytes_per_page(config, recipe) == used


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_whole_plan_is_within_5_percent_of_what_is_used(dtype: Any) -> None:
    """Weights, pages, activations and logits together: a step at the budget with the longest
    context, while the logits of the step before are still held.
    """
    config = small_config("llama-3.1-8b", num_hidden_layers=6)
    limits = Limits(max_context=1024, max_batch=64, token_budget=256)
    recipe = with_auto(Recipe(limits=limits), config, parse_dtype(dtype), "cpu")
    plan = plan_memory(config, recipe, free_bytes=180 << 20)
    assert plan.num_pages > plan.min_pages

    def run() -> None:
        model = build_model(config, parse_dtype(dtype), "cpu")
        fill_random(model)
        pages = PagedSequence(config, dtype, plan.num_pages, recipe.kv.page_size)
        pages.begin(0, 64)
        hidden_TD = model(torch.arange(64), pages)
        logits_RV = model.logits(hidden_TD[torch.arange(64)])
        del hidden_TD
        pages.begin(1024 - 256, 256)
        model(torch.arange(256), pages)
        assert logits_RV.isfinite().all()

    with torch.inference_mode():
        used = allocations(run).peak_bytes
    planned = sum(plan.bytes_of(name) for name in ("weights", "KV pages", "activations", "logits"))
    assert planned == pytest.approx(used, rel=0.05)
    assert plan.bytes_of("activations") > 0.1 * planned  # none of them is lost in the others
    assert plan.bytes_of("KV pages") > 0.1 * planned
    assert plan.bytes_of("weights") > 0.1 * planned


def test_pages_fill_what_may_be_used_and_no_more() -> None:
    config = describe_shape("llama-3.1-8b").config
    plan = plan_memory(config, recipe_for(config), 139 * GIB)
    assert plan.used_bytes <= plan.usable_bytes < plan.used_bytes + plan.page_bytes
    assert plan.usable_bytes == int(139 * GIB * 0.9)
    assert plan.left_bytes == 139 * GIB - plan.used_bytes
    assert plan.needed_bytes == plan.used_bytes - (plan.num_pages - 2048) * plan.page_bytes
    assert plan.num_pages * 64 > 576_352  # the throughput mix fits at once
    assert [item.name for item in plan.items] == [
        "weights",
        "activations",
        "logits",
        "penalty tables",
        "step inputs",
        "rotary tables",
        "graphs",
        "workspace",
        "KV pages",
    ]
    assert all(item.num_bytes > 0 and item.meaning for item in plan.items)
    tables = RopeTables(config, 1000, torch.device("cpu"))._tables.values()
    held = sum(tensor.nbytes for table in tables for tensor in table)
    assert plan.bytes_of("rotary tables") == held * 131072 // 1000


def test_a_small_model_has_room_for_the_segments_of_its_graphs() -> None:
    """The first capture takes tens of MiB whatever the model: the plan lets more follow."""
    config = small_config("llama-3.1-8b")
    recipe = with_auto(Recipe(), config, torch.bfloat16, "cuda:0")
    least = GRAPH_POOL_BYTES + NUM_GRAPHS * driver_bytes(config)
    assert itemise(config, recipe, 139 * GIB).bytes_of("graphs") > least
    assert GRAPH_POOL_BYTES > 2 * (32 << 20) + 2 * (20 << 20)


def test_a_cpu_has_no_graphs() -> None:
    config = small_config("llama-3.1-8b")
    plan = plan_memory(config, recipe_for(config, "cpu"), 4 * GIB)
    assert plan.bytes_of("graphs") == 0
    assert plan.bytes_of("workspace") > 0
    assert plan.usable_bytes == 2 * GIB


def test_without_a_prefix_cache_no_page_is_idle() -> None:
    config = small_config("llama-3.1-8b")
    limits = Limits(max_context=1000, max_batch=3)
    recipe = recipe_for(config, limits=limits, kv=KV(prefix_cache=False))
    assert plan_memory(config, recipe, 100 * GIB).num_pages == 3 * 16
    cached = edited(recipe, "kv.prefix_cache", True)
    assert plan_memory(config, cached, 100 * GIB).num_pages > 1000


def test_speculation_takes_more_rows_and_a_draft_its_own_memory() -> None:
    config, draft = describe_shape("llama-3.1-8b").config, describe_shape("llama-3.2-1b").config
    plain = recipe_for(config)
    lookup = edited(plain, "speculation.method", "prompt-lookup")
    base, looked_up = (itemise(config, recipe, 139 * GIB) for recipe in (plain, lookup))
    rows = 1 + lookup.speculation.max_draft_tokens
    assert looked_up.bytes_of("logits") == rows * base.bytes_of("logits")
    drafted = recipe_for(config, speculation=Speculation("draft", draft_model="small"))
    both = itemise(config, drafted, 139 * GIB, draft)
    assert both.bytes_of("draft weights") == weight_bytes(draft, "bf16")
    assert both.page_bytes == base.page_bytes + bytes_per_page(draft, plain)
    assert both.num_pages < looked_up.num_pages < base.num_pages


@pytest.mark.parametrize("name", ["llama-3.1-70b", "qwen3-30b-a3b", "gemma-2-9b"])
@pytest.mark.parametrize("degree", [2, 4, 8])
def test_each_rank_holds_its_part(name: str, degree: int) -> None:
    """All but norms and routers is shared out; KV heads are copied where there are too few."""
    config = describe_shape(name).config
    rank = rank_config(config, degree)
    whole, part = weight_bytes(config, "bf16"), weight_bytes(rank, "bf16")
    assert whole / degree <= part < 1.02 * whole / degree
    assert rank.num_kv_heads == max(1, config.num_kv_heads // degree)
    assert (rank.hidden_size, rank.head_dim) == (config.hidden_size, config.head_dim)
    one = itemise(config, recipe_for(config), 139 * GIB)
    many = itemise(config, recipe_for(config, parallel=Parallel(degree)), 139 * GIB)
    assert many.bytes_of("weights") == part
    assert many.page_bytes == one.page_bytes * rank.num_kv_heads // config.num_kv_heads
    assert many.bytes_of("activations") < one.bytes_of("activations")


@pytest.mark.parametrize(
    ("changes", "degree", "says"),
    [
        ({}, 3, "8 query heads"),
        ({"intermediate_size": 1022}, 4, "1022 MLP columns"),
        ({"num_attention_heads": 24, "num_key_value_heads": 6}, 4, "6 KV heads"),
    ],
)
def test_a_degree_that_does_not_divide_is_refused(
    changes: dict[str, Any], degree: int, says: str
) -> None:
    with pytest.raises(UsageError, match=f"tensor_parallel is {degree}; {says}"):
        rank_config(small_config("llama-3.1-8b", **changes), degree)


# --- what does not fit ----------------------------------------------------------------------

FIELD_OF = {flag(name): name for name in field_table()}


def refusal(config: ModelConfig, recipe: Recipe, free_bytes: int, schemes: Any = ()) -> str | None:
    try:
        plan_memory(config, recipe, free_bytes, schemes=schemes)
    except OutOfMemoryError as error:
        return str(error)
    return None


def followed(recipe: Recipe, remedy: str) -> Recipe:
    """A recipe after all that a remedy says, read from its text as a user would."""
    found = re.findall(r"(?:use|lower) (--[a-z-]+) (?:to )?(\S+)", remedy)
    assert found, remedy
    for name, value in found:
        recipe = edited(recipe, FIELD_OF[name], int(value) if value.isdigit() else value)
    return recipe


def plan_after(config: ModelConfig, recipe: Recipe, free_bytes: int, remedy: str) -> MemoryPlan:
    return itemise(config, followed(recipe, remedy), free_bytes)


@pytest.mark.parametrize("schemes", [(), ("fp8", "int4-g128")])
@pytest.mark.parametrize("name", ["llama-3.1-8b", "gemma-2-9b", "qwen3-30b-a3b", "smollm2-135m"])
def test_every_remedy_works(name: str, schemes: tuple[str, ...]) -> None:
    """From far too little memory to enough: each remedy is one that the next plan accepts."""
    config = describe_shape(name).config
    recipe = recipe_for(config)
    kinds = set()
    needed = itemise(config, recipe, GIB).needed_bytes / 0.9
    for step in range(1, 23):
        free = int(needed * step / 20.01)
        said = refusal(config, recipe, free, schemes)
        assert (said is None) == (step > 20), step
        if said is None:
            kinds.add("fits")
            continue
        assert "\n" not in said
        remedies = said.split("; ")[1].split(" or ")
        if "no limit is low enough" in said:
            gib = re.search(r"device with ([\d.]+) (GiB|MiB) free", said)
            assert gib is not None, said
            enough = float(gib[1]) * (GIB if gib[2] == "GiB" else 2**20)
            assert itemise(config, recipe, int(enough)).fits
            kinds.add("larger device")
            continue
        for remedy in remedies:
            assert plan_after(config, recipe, free, remedy).fits, said
            kinds |= {FIELD_OF[word] for word in re.findall(r"--[a-z-]+", remedy)}
    assert {"fits", "limits.max_context"} <= kinds
    assert ("scheme" in kinds) == bool(schemes)
    if not schemes:
        assert "larger device" in kinds


def test_the_context_advised_is_the_longest_round_one() -> None:
    config = describe_shape("llama-3.1-8b").config
    recipe, free = recipe_for(config), 24 * GIB
    said = refusal(config, recipe, free)
    assert said is not None
    found = re.fullmatch(
        r"needs 33(?:\.\d)? GiB \(weights 15 GiB\), 21\.6 GiB may be used of 24 GiB free; "
        r"lower --max-context to (\d+)",
        said,
    )
    assert found is not None, said
    context = int(found[1])
    assert context % 1024 == 0
    assert itemise(config, edited(recipe, "limits.max_context", context), free).fits
    longer = edited(recipe, "limits.max_context", context + 1024)
    assert not itemise(config, longer, free).fits


def test_two_ways_are_named_where_both_work() -> None:
    config = describe_shape("llama-3.1-8b").config
    recipe = recipe_for(config, limits=Limits(max_context=16384))
    said = refusal(config, recipe, 20 * GIB, ("int4-g128",))
    assert said is not None
    assert re.search(r"; lower --max-context to \d+ or use --scheme int4-g128$", said), said


def test_a_budget_is_lowered_where_the_context_is_not_the_cause() -> None:
    config = small_config("llama-3.1-8b", intermediate_size=65536)
    recipe = recipe_for(config, limits=Limits(512, 32, 100_000))
    needed = itemise(config, recipe, GIB).needed_bytes
    said = refusal(config, recipe, int(0.7 * needed / 0.9))
    assert said is not None
    assert re.search(r"; lower --token-budget to \d+$", said), said


def test_a_context_nobody_named_is_the_longest_that_fits() -> None:
    config = describe_shape("llama-3.1-8b").config
    recipe = recipe_for(config)
    assert fitted(config, recipe, 139 * GIB) == recipe
    smaller = fitted(config, recipe, 24 * GIB)
    assert plan_memory(config, smaller, 24 * GIB).fits
    assert 16384 < smaller.limits.filled().max_context < 131072
    assert fitted(config, recipe, 10 * GIB) == recipe  # which plan_memory then refuses
