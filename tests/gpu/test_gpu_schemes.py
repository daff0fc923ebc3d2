"""Schemes on a GPU: each layer near its definition at every number of rows, and an engine whose
logits are those of the decoded weights.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from engines import assert_idle, engine_for, measure_shapes, prompts_of
from test_gpu_engine import shape_model
from torch import Tensor

from ridgeline.engine import Engine, Sampling
from ridgeline.kernels.launch import target_of
from ridgeline.models.transformer import RMSNorm
from ridgeline.quantization.late_sums import with_late_sums
from ridgeline.quantization.linear import ROUNDED_FROM, QuantizedLinear
from ridgeline.quantization.nearest import nearest
from ridgeline.quantization.scheme import FP8, parse_scheme
from ridgeline.recipe import Limits, Recipe

SCHEMES = ["int8", "int4-g64", "int4-g128-asym", "w8a8-int8", "fp8", "fp8-tensor", "fp8-block"]
BF16 = torch.bfloat16


def runs(name: str) -> None:
    if name.startswith("fp8") and target_of(torch.empty(0, device="cuda")).fp8 != FP8:
        pytest.skip("this GPU has no e4m3fn")


def random(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, generator=generator, device="cuda").to(BF16)


@pytest.mark.parametrize("rows", [1, 3, 17, 64, 65, 127, 128, 1000])
@pytest.mark.parametrize("name", SCHEMES)
def test_a_layer_is_near_its_definition(name: str, rows: int) -> None:
    """The definition is the same layer on a CPU. Few rows and many go ways of their own."""
    runs(name)
    weight_OD, bias_O = random(1024, 512) * 512**-0.5, random(1024, seed=1)
    norm = RMSNorm(512, 1e-5, 0.0).to("cuda", BF16).requires_grad_(False)
    norm.weight.copy_(1 + 0.1 * random(512, seed=2))
    layer = nearest("a layer", weight_OD, bias_O, parse_scheme(name), BF16)
    on_cpu = nearest("a layer", weight_OD.cpu(), bias_O.cpu(), parse_scheme(name), BF16)
    assert torch.equal(layer.decoded().cpu(), on_cpu.decoded())
    if rows < ROUNDED_FROM and layer.scheme.spread != "block":
        on_cpu.inputs = None  # a GPU does not round x there
    x_TD, residual_TO = random(rows, 512, seed=3), random(rows, 512, seed=4)
    with torch.inference_mode():
        for given in ((None, None, None), (norm, "silu", None), (None, "silu", residual_TO)):
            found = layer(x_TD, *given)
            host = [part.cpu() if isinstance(part, Tensor) else part for part in given]
            if given[0] is not None:
                host[0] = RMSNorm(512, 1e-5, 0.0).to(BF16).requires_grad_(False)
                host[0].weight.copy_(norm.weight.cpu())
            expected = on_cpu(x_TD.cpu(), *host).cuda()
            assert found.shape == expected.shape
            error = (found.float() - expected.float()).norm() / expected.float().norm()
            assert error < (0.02 if layer.inputs is not None else 0.008), (given, error)


def test_int8_is_packed_for_the_kernels() -> None:
    layer = nearest("a layer", random(64, 128), None, parse_scheme("int8"), BF16)
    assert layer.weight.dtype == torch.int32
    odd = nearest("a layer", random(64, 120), None, parse_scheme("int8"), BF16)
    assert odd.weight.dtype == torch.int8
    x_TD = random(4, 120, seed=1)
    expected = x_TD.float() @ odd.decoded().T
    assert (odd(x_TD).float() - expected).norm() / expected.norm() < 0.008


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("name", SCHEMES)
def test_an_engine_answers_as_its_quantized_model_does(name: str, graphs: bool) -> None:
    """With random weights tokens part after a near tie, so most of the first ones must agree."""
    runs(name)
    model = shape_model()
    engine = engine_for(model, scheme=name, graphs=graphs, budget=256, max_batch=32, num_pages=400)
    assert any(isinstance(module, QuantizedLinear) for module in engine.model.modules())
    prompts = prompts_of([5, 40, 200, 90], vocab_size=1000)
    outputs = engine.generate(prompts, Sampling(max_tokens=4, ignore_eos=True))
    assert_idle(engine)
    plain = engine_for(engine.model, graphs=False, budget=256, max_batch=1, num_pages=400)
    alone = [plain.generate([p], Sampling(max_tokens=1, ignore_eos=True))[0] for p in prompts]
    same = [a.tokens[0] == b.tokens[0] for a, b in zip(outputs, alone, strict=True)]
    assert sum(same) >= 3, (outputs, alone)


def test_residuals_that_norms_add_change_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt's likelihoods with and without; a norm may take its squares in another order."""
    runs("fp8")
    (prompt,) = prompts_of([300], vocab_size=1000)
    found = []
    for kept in (with_late_sums, lambda model: model):
        monkeypatch.setattr("ridgeline.engine.loading.sources.with_late_sums", kept)
        engine = engine_for(shape_model(layers=8), scheme="fp8", budget=512, num_pages=400)
        assert engine.model.adds_late == (kept is with_late_sums)
        (output,) = engine.generate([prompt], Sampling(max_tokens=1, prompt_logprobs=0))
        assert output.prompt_logprobs is not None
        found.append([each.logprob for each in output.prompt_logprobs if each is not None])
    late, usual = (torch.tensor(each) for each in found)
    assert len(late) == 299
    assert (late - usual).abs().mean() < 0.02
    assert late.std() > 0.5


def test_an_engine_holds_copies_for_steps_of_many_tokens() -> None:
    """As asked, and by itself where there is room; the plan counts them."""
    share = (4 << 30) / torch.cuda.mem_get_info()[0]  # others test here too
    limits = Limits(max_context=2048, max_batch=8, memory_share=min(0.9, share))
    recipe = Recipe(scheme="int4-g128", limits=limits)
    engine = Engine(shape_model(layers=2), recipe)
    assert engine.recipe.copies
    layers = [m for m in engine.model.modules() if isinstance(m, QuantizedLinear)]
    held = sum(layer.copy.nbytes for layer in layers if layer.copy is not None)
    assert held == engine.memory_plan.bytes_of("copies") > 0
    prompts = prompts_of([5, 300], vocab_size=1000)
    outputs = engine.generate(prompts, Sampling(max_tokens=4, ignore_eos=True))
    assert [output.status for output in outputs] == ["finished"] * 2
    del engine
    without = Engine(shape_model(layers=2), replace(recipe, copies=False))
    assert all(m.copy is None for m in without.model.modules() if isinstance(m, QuantizedLinear))


def test_layers_are_chosen_by_their_times() -> None:
    config = shape_model(layers=1).config
    choices = measure_shapes(config, parse_scheme("int8"), [1], BF16, "cuda")
    assert len(choices) == 4
    assert any(choice.quantize for choice in choices), [choice.reason for choice in choices]
