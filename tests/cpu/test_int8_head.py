"""`Recipe.head`: the head as int8 codes, with all that stands around it, gives token by token what
the plain loop gives; its bytes are counted, and it stays plain where that is faster.
"""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import quantized_files as files
import torch
from command_line import generate, make_folder
from engines import assert_exact, engine_for, naive_outputs, prompts_of, tiny
from safetensors.torch import load_file, save_file
from speculation import LOOKUP, force_drafts, markov
from test_choose_layers import Clock
from test_engine_schemes import decoded
from test_layer_speed import use_clock
from test_quantized_reading import CASES
from thread_ranks import ThreadedEngine
from tiny_models import save_model

from ridgeline.cli import main
from ridgeline.engine import Engine, Sampling
from ridgeline.engine.loading.layer_speed import measured_choices
from ridgeline.engine.loading.loading import load
from ridgeline.engine.memory.footprint import weight_bytes
from ridgeline.engine.memory.plan import itemise
from ridgeline.errors import NumericsError, UnsupportedError, UsageError
from ridgeline.kernels.registry import get_op
from ridgeline.models import Transformer
from ridgeline.models.copies import with_kinds
from ridgeline.models.shapes import describe_shape
from ridgeline.parallel.degrees import rank_config
from ridgeline.quantization import nearest as nearest_module
from ridgeline.quantization.choose import in_words
from ridgeline.quantization.head import with_head
from ridgeline.quantization.linear import QuantizedLinear
from ridgeline.quantization.nearest import nearest
from ridgeline.quantization.scheme import parse_scheme
from ridgeline.quantization.sizes import head_matrix, read_bytes_per_weight
from ridgeline.recipe import KV, Limits, Parallel, Recipe, with_auto

INT8 = parse_scheme("int8")
GREEDY = Sampling(max_tokens=6, ignore_eos=True)
LIMITS = Limits(max_batch=2, token_budget=32)
RECIPE = Recipe(dtype="fp32", head="int8", kernels="reference", limits=LIMITS)


def held_bytes(model: Transformer) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())


@pytest.mark.parametrize("name", ["llama-tied", "llama-mha", "gemma2", "granite-bias", "qwen3"])
def test_tokens_are_those_of_the_decoded_head(name: str) -> None:
    """Tied and not, with logits that are capped or scaled behind it; longer prompts, and batches
    that grow and shrink.
    """
    model = tiny(name)
    engine = engine_for(model, head="int8")
    head = engine.model.head
    assert isinstance(head, QuantizedLinear)
    assert (head.scheme, head.weight.dtype) == (INT8, torch.int8)
    assert engine.model.embed.weight is model.embed.weight
    assert not isinstance(model.head, QuantizedLinear)
    plain = decoded(engine.model)
    assert not torch.equal(plain.head.weight, model.head.weight)
    prompts = prompts_of([45, 3])
    for prompt, output in zip(prompts, engine.generate(prompts, [GREEDY] * 2), strict=True):
        assert [output.tokens] == naive_outputs(plain, prompt, GREEDY)


@pytest.mark.parametrize("scheme", [None, "int4-g32", "w8a8-int8", "fp8"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_beside_every_scheme(scheme: str | None, dtype: str) -> None:
    engine = engine_for(tiny("phi3-longrope-partial", dtype), scheme=scheme, head="int8")
    assert engine.recipe.head == "int8"
    assert engine.model.logits_dtype == engine.model.embed.weight.dtype
    prompts, sampling = prompts_of([40, 5]), replace(GREEDY, logprobs=1)
    for output in engine.generate(prompts, [sampling] * 2):
        assert output.status == "finished", output.reason
    if dtype == "fp32":
        assert_exact(engine, prompts, [GREEDY] * 2)


def test_drafting_ahead_scoring_and_embedding() -> None:
    """Several rows of a request are verified at once; prompts get the head's logits, and what is
    embedded never meets it.
    """
    model = markov(deepcopy(tiny("llama-mha")))
    engine = engine_for(model, head="int8", speculation=LOOKUP)
    force_drafts(engine)
    assert_exact(engine, prompts_of([9, 20]), [Sampling(max_tokens=40)] * 2)
    assert engine.stats.accepted_tokens > 10
    plain = engine_for(decoded(engine.model))
    asked, (prompt,) = Sampling(max_tokens=1, prompt_logprobs=0), prompts_of([60], seed=5)
    found, right = (each.generate([prompt], asked)[0] for each in (engine, plain))
    assert found.prompt_logprobs is not None
    assert right.prompt_logprobs is not None
    pairs = list(zip(found.prompt_logprobs, right.prompt_logprobs, strict=True))[1:]
    assert all(one.logprob == pytest.approx(two.logprob, abs=1e-4) for one, two in pairs)
    untouched = engine_for(model).embed([prompt])
    torch.testing.assert_close(engine.embed([prompt]), untouched)


@pytest.mark.parametrize("name", ["llama-tied", "llama-mha"])
@pytest.mark.parametrize("scheme", [None, "int8"])
def test_the_plan_is_what_the_model_holds(name: str, scheme: str | None, tmp_path: Path) -> None:
    save_model(name, tmp_path)
    recipe = replace(RECIPE, scheme=scheme, quantize_all=True)
    from_file = load(tmp_path, recipe, None, "cpu", None)
    given = load(tiny(name), recipe, None, "cpu", None)
    for loaded in (from_file, given):
        assert isinstance(loaded.model.head, QuantizedLinear)
        assert loaded.plan.bytes_of("weights") == held_bytes(loaded.model)
        assert "head int8" in next(i.meaning for i in loaded.plan.items if i.name == "weights")
    again = load(from_file.model, Recipe(limits=LIMITS), None, "cpu", None)  # as it is
    assert again.plan.bytes_of("weights") == held_bytes(from_file.model)
    plain = itemise(given.model.config, replace(given.recipe, head="plain"), 2**30)
    more = given.plan.bytes_of("weights") - plain.bytes_of("weights")
    assert (more > 0) == given.model.config.tied_embeddings


def test_a_given_model_takes_over_what_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own head stays with the caller, unless it is the embedding."""
    monkeypatch.setattr("ridgeline.engine.loading.sources.available_memory", lambda device: 1 << 30)
    free = {
        (name, head): load(
            tiny(name), replace(RECIPE, head=head, quantize_all=True), None, "cpu", None
        ).plan.free_bytes
        for name in ("llama-tied", "llama-mha")
        for head in ("plain", "int8")
    }
    assert free["llama-tied", "int8"] == free["llama-tied", "plain"]
    own = tiny("llama-mha").head.weight.nbytes
    assert free["llama-mha", "int8"] == free["llama-mha", "plain"] - own


def test_bytes_that_a_step_reads() -> None:
    """An embedding beside a head of codes is only looked up."""
    for name in ("llama-tied", "llama-mha"):
        model = tiny(name)
        changed = with_head(model, INT8)
        head = changed.head.weight.nbytes + changed.head.scale.nbytes
        layers = held_bytes(model) - model.embed.weight.nbytes
        if not model.config.tied_embeddings:
            layers -= model.head.weight.nbytes
        weights = (layers + model.embed.weight.nbytes) / 4  # as many as a step reads
        assert read_bytes_per_weight(model) == 4.0
        assert read_bytes_per_weight(changed) == pytest.approx((layers + head) / weights)


def test_half_a_head_of_llama_and_its_copy() -> None:
    config = describe_shape("llama-3.1-8b").config
    size = config.vocab_size * config.hidden_size
    plain, codes = (weight_bytes(config, "bf16", "int4-g128", head=h) for h in ("plain", "int8"))
    assert plain - codes == size - 4 * config.vocab_size
    asked = with_auto(Recipe(head="int8", copies=True), config, torch.bfloat16, "cuda:0")
    assert itemise(config, asked, 139 << 30).bytes_of("copies") == 2 * size
    two = replace(asked, copies=False, parallel=Parallel(2))
    part = weight_bytes(rank_config(config, 2), "bf16", head="int8")
    assert itemise(config, two, 139 << 30).bytes_of("weights") == part


def test_codes_of_a_checkpoint_stay_beside_it(tmp_path: Path) -> None:
    writer, config, _ = CASES["fp8-rows"]
    files.write_checkpoint(tmp_path, "llama-mha", writer, config)
    recipe = replace(RECIPE, quantize_all=True)
    loaded = load(tmp_path, recipe, None, "cpu", None)
    assert isinstance(loaded.model.layers[0].attn.out, QuantizedLinear)
    assert isinstance(loaded.model.head, QuantizedLinear)
    assert loaded.plan.bytes_of("weights") == held_bytes(loaded.model)
    quantize_the_head(tmp_path, writer)
    for recipe in (RECIPE, replace(RECIPE, parallel=Parallel(2))):
        with pytest.raises(UsageError, match=r"is quantized already .*; remove --head") as raised:
            Engine(tmp_path, recipe, device="cpu")
        assert "\n" not in str(raised.value)
    assert Engine(tmp_path, replace(RECIPE, head="plain"), device="cpu").recipe.head == "plain"


def quantize_the_head(folder: Path, writer: files.Writer) -> None:
    tensors = load_file(folder / "model.safetensors")
    stored, _ = writer("lm_head", tensors.pop("lm_head.weight"))
    tensors |= {f"lm_head.{last}": tensor.contiguous() for last, tensor in stored.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def test_what_cannot_be_is_one_line() -> None:
    codes = with_head(tiny("llama-tied"), INT8)
    for model, changes, error, said in (
        (tiny("llama-tied"), {"deterministic": True}, UnsupportedError, "deterministic and head"),
        (codes, {}, UsageError, "the model's is int8 already; remove --head"),
        (codes, {"head": "plain", "scheme": "int8"}, UsageError, "quantized already"),
    ):
        with pytest.raises(error, match=said) as raised:
            engine_for(model, **({"head": "int8"} | changes))
        assert "\n" not in str(raised.value)
    with pytest.raises(UsageError, match="head is 'int4'; give one of plain, int8"):
        Recipe(head="int4")  # type: ignore[arg-type]
    broken = with_kinds(tiny("llama-mha"), lambda kind: kind)
    broken.head.weight = torch.nn.Parameter(broken.head.weight.clone(), requires_grad=False)
    broken.head.weight[3, 5] = float("nan")
    with pytest.raises(NumericsError, match="the head has weights that are NaN"):
        engine_for(broken, head="int8")


def slow_head(monkeypatch: pytest.MonkeyPatch, share: float) -> None:
    """The head's codes take this share of the plain head's time."""
    clock = Clock(lambda depth, rows: share)
    monkeypatch.setattr(
        "ridgeline.engine.loading.head_choice.measured_choices",
        lambda *given, **more: measured_choices(*given, **more | {"timer": clock}),
    )


@pytest.fixture
def no_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path / "cache"))


@pytest.mark.usefixtures("no_cache")
def test_a_slower_head_stays_plain_and_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("llama-mha")
    shape = " x ".join(map(str, head_matrix(model.config)))
    said = f"int8 is slower here, so these stay in fp32: {shape} (0.50x at 1 row)"
    slow_head(monkeypatch, 2.0)
    slow = Engine(model, RECIPE, num_pages=8)
    assert slow.recipe.head == "plain"
    assert slow.model.head is model.head
    assert in_words(slow.choices, "fp32") == said
    assert slow.memory_plan.bytes_of("weights") == held_bytes(slow.model)
    use_clock(monkeypatch, lambda depth, rows: 2.0 if depth == 80 else 0.5)
    both = Engine(model, replace(RECIPE, scheme="int8"), num_pages=8)
    assert "48 x 80" in (in_words(both.choices, "fp32") or "")
    assert shape in (in_words(both.choices, "fp32") or "")
    assert both.memory_plan.bytes_of("weights") == held_bytes(both.model)
    all_of_it = Engine(model, replace(RECIPE, quantize_all=True), num_pages=8)
    assert (all_of_it.recipe.head, all_of_it.choices) == ("int8", ())


@pytest.mark.usefixtures("no_cache")
def test_a_faster_head_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    slow_head(monkeypatch, 0.5)
    engine = Engine(tiny("llama-mha"), RECIPE, num_pages=8)
    assert isinstance(engine.model.head, QuantizedLinear)
    assert in_words(engine.choices, "fp32") is None


@pytest.mark.parametrize("name", ["llama-tied", "gemma2"])
def test_on_two_ranks(name: str) -> None:
    """131 words on two ranks: one has a row that fills up."""
    model, prompts = tiny(name), prompts_of([40, 3])
    one = with_head(model, INT8)
    sampling = replace(GREEDY, logprobs=2, prompt_logprobs=1)
    with ThreadedEngine(model, head="int8") as ranks:
        assert isinstance(ranks.engine.model.head, QuantizedLinear)
        for prompt, output in zip(prompts, ranks.engine.generate(prompts, sampling), strict=True):
            assert [output.tokens] == naive_outputs(one, prompt, sampling)


@pytest.mark.usefixtures("no_cache")
def test_ranks_agree_on_a_slower_head(monkeypatch: pytest.MonkeyPatch) -> None:
    slow_head(monkeypatch, 2.0)
    model = tiny("llama-tied")
    with ThreadedEngine(model, head="int8", quantize_all=False) as ranks:
        assert ranks.engine.recipe.head == "plain"
        assert not isinstance(ranks.engine.model.head, QuantizedLinear)
        assert ranks.engine.generate(prompts_of([9]), GREEDY)[0].status == "finished"


def test_rows_are_rounded_some_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    weight_OD = torch.randn(131, 64)
    for name in ("int8", "int4-g32-asym", "fp8", "fp8-tensor"):
        about = ("a layer", weight_OD, None, parse_scheme(name), torch.float32)
        whole = nearest(*about)
        with monkeypatch.context() as patch:
            patch.setattr(nearest_module, "AT_ONCE", 64 * 10)
            pieces = nearest(*about)
        assert torch.equal(pieces.decoded(), whole.decoded()), name


def test_its_shape_is_tuned() -> None:
    labels = [case.label for case in get_op("quantized_linear").bench_cases]
    heads = [label for label in labels if "w8a16 head" in label and "128256" in label]
    assert len(heads) == 2


def test_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`generate` says it, `--compare` has it as a variant, `quantize` leaves a recipe that asks for
    it, and measured the model with it.
    """
    folder = make_folder(tmp_path / "model", hidden_size=64, num_hidden_layers=2)
    asked = ("--head", "int8", "--quantize-all")
    assert main([*generate(folder, *asked, "--json")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["head"], found["scheme"]) == ("int8", None)
    assert main([*generate(folder, *asked, "--scheme", "int8")]) == 0
    assert "int8, head int8, fp32 on" in capsys.readouterr().err
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "abc"}\n')
    bench = ["bench", "engine", str(folder), "--workload", str(prompts), "--json"]
    bench += ["--output-tokens", "2", "--max-context", "64"]
    bench += ["--device", "cpu", "--quantize-all", "--compare", "fp32,fp32+head,int8+head"]
    assert main([*bench, "--save", str(tmp_path / "records")]) == 0
    rows = json.loads(capsys.readouterr().out)["comparisons"][0]["variants"]
    assert [row["head"] for row in rows] == ["plain", "int8", "int8"]
    assert [row["scheme"] for row in rows] == [None, None, "int8"]
    assert Path(rows[2]["record"]).is_file()
    assert main([*bench, "--head", "int8"]) == UsageError.exit_code
    assert "--head does not go with --compare" in capsys.readouterr().err


def test_quantize_measures_it_and_leaves_a_recipe(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_folder(tmp_path / "model", hidden_size=64, num_hidden_layers=2)
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog, and again. " * 120)
    common = ["quantize", str(folder), "--scheme", "int8", "--sequences", "2", "--window", "40"]
    common += ["--bytes", "2000", "--device", "cpu", "--text", str(text), "--batch-sizes", "none"]
    common += ["--calibration", str(text), "--max-kl", "1", "--json"]
    found: dict[str, Any] = {}
    for head in ("plain", "int8"):
        assert main([*common, "--out", str(tmp_path / head), "--head", head]) == 0
        found[head] = json.loads(capsys.readouterr().out)
    kl = {head: one["quality"]["mean_kl"]["value"] for head, one in found.items()}
    assert 0 < kl["plain"] != kl["int8"] > 0
    sizes = [one["file_bytes_after"] for one in found.values()]
    assert sizes[0] == sizes[1]  # of other engines
    assert not (tmp_path / "plain" / "recipe.json").exists()
    assert Recipe.load(tmp_path / "int8") == Recipe(head="int8")
    engine = Engine(
        tmp_path / "int8",
        replace(Recipe.load(tmp_path / "int8"), quantize_all=True, kv=KV(page_size=16)),
        device="cpu",
        num_pages=8,
    )
    assert isinstance(engine.model.head, QuantizedLinear)
