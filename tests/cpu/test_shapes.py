"""Named shapes: the parameters their makers state, weights random and sane, saved and read back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from allocations import allocations
from test_families import all_logits

from ridgeline.engine.naive import OneSequence
from ridgeline.errors import UsageError
from ridgeline.models import build_model, fill_random
from ridgeline.models.cost import num_parameters
from ridgeline.models.families import describe_hf
from ridgeline.models.shapes import SHAPES, describe_shape, random_model
from ridgeline.models.transformer import Block, Transformer
from ridgeline.quantization import load_model, save_model

# As their model cards count them, a tied head once; Gemma 3 without its vision tower.
STATED = {
    "smollm2-135m": 134_515_008,
    "smollm2-1.7b": 1_711_376_384,
    "smollm3-3b": 3_075_098_624,
    "llama-2-7b": 6_738_415_616,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "mistral-7b": 7_248_023_552,
    "mixtral-8x7b": 46_702_792_704,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-32b": 32_763_876_352,
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "gemma-2-2b": 2_614_341_888,
    "gemma-2-9b": 9_241_705_984,
    "gemma-3-1b": 999_885_952,
    "gemma-3-12b": 11_766_034_176,
    "phi-4": 14_659_507_200,
    "granite-3.1-8b": 8_170_848_256,
    "tiny": 1_606_272,
}
SMALLER = {  # every family, with what makes it large cut down
    "hidden_size": 96,
    "intermediate_size": 160,
    "vocab_size": 300,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_hidden_layers": 24,
}
SMALLER_EXPERTS = {"num_experts": 8, "num_local_experts": 8, "moe_intermediate_size": 48}


def small_model(name: str, dtype: torch.dtype) -> Transformer:
    """A model with a named shape's features and depth enough for hidden states to run away."""
    experts = {key: value for key, value in SMALLER_EXPERTS.items() if key in SHAPES[name]}
    values = SHAPES[name] | SMALLER | experts
    return fill_random(build_model(describe_hf(values).config, dtype, "cpu"))


def hidden_sizes(model: Transformer, tokens: torch.Tensor) -> list[float]:
    """Root mean square of the residual stream after each layer, by hooks."""
    found: list[float] = []

    def note(block: Block, inputs: tuple[torch.Tensor, ...], out: torch.Tensor) -> None:
        found.append(float(out.float().square().mean().sqrt()))

    hooks = [layer.register_forward_hook(note) for layer in model.layers]
    cache = OneSequence(model, len(tokens))
    cache.begin(len(tokens), prompt_length=len(tokens))
    with torch.inference_mode():
        model(tokens, cache)
    for hook in hooks:
        hook.remove()
    return found


@pytest.mark.smoke
@pytest.mark.parametrize("name", SHAPES)
def test_parameters_are_as_stated(name: str) -> None:
    assert num_parameters(describe_shape(name).config) == STATED[name]


@pytest.mark.smoke
def test_the_shape_that_is_measured() -> None:
    """What the published figures of the 8B shape are about."""
    config = describe_shape("llama-3.1-8b").config
    assert (config.hidden_size, config.num_layers, config.mlp_size) == (4096, 32, 14336)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (32, 8, 128)
    assert (config.vocab_size, config.tied_embeddings) == (128256, False)
    assert config.max_context == 131072


@pytest.mark.sweep(keep=6)
@pytest.mark.parametrize(
    "name", ["llama-3.1-8b", "qwen2.5-7b", "qwen3-30b-a3b", "mixtral-8x7b", "gemma-2-9b",
             "gemma-3-1b", "smollm3-3b", "phi-4", "granite-3.1-8b"],
)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_hidden_states_stay_sane_at_any_depth(name: str, dtype: torch.dtype) -> None:
    model = small_model(name, dtype)
    tokens = torch.randint(0, 300, (40,), generator=torch.Generator().manual_seed(1))
    sizes = hidden_sizes(model, tokens)
    assert len(sizes) == 24
    assert all(0.05 < size < 20 for size in sizes), sizes


@pytest.mark.slow
def test_the_demos_shape_at_full_depth() -> None:
    model = random_model("smollm2-135m", torch.bfloat16, "cpu")
    tokens = torch.randint(0, 49152, (32,), generator=torch.Generator().manual_seed(1))
    sizes = hidden_sizes(model, tokens)
    assert len(sizes) == 30
    assert all(0.05 < size < 20 for size in sizes), sizes
    logits = all_logits(model, tokens.tolist())
    assert 0.3 < float(logits.std()) < 5
    assert logits.argmax(-1).unique().numel() > 10  # the choice depends on the input


def test_every_weight_is_random_and_the_seed_decides() -> None:
    model, same, other = (random_model("tiny", torch.float32, "cpu", seed=s) for s in (0, 0, 1))
    for (name, ours), twin, different in zip(
        model.named_parameters(), same.parameters(), other.parameters(), strict=True
    ):
        assert ours.unique().numel() > 0.9 * ours.numel(), name
        assert torch.equal(ours, twin), name
        assert not torch.equal(ours, different), name


def test_memory_holds_the_weights_once() -> None:
    found = allocations(lambda: random_model("tiny", torch.bfloat16, "cpu", num_layers=8))
    weights = sum(parameter.nbytes for parameter in found.result.parameters())
    assert found.kept_bytes >= weights
    assert found.peak_bytes < 1.02 * weights


def test_layers_can_be_cut() -> None:
    for name in ("gemma-3-12b", "smollm3-3b", "qwen3-30b-a3b"):
        assert describe_shape(name, 7).config.num_layers == 7
    assert random_model("tiny", torch.float32, "cpu", num_layers=1).config.num_layers == 1
    with pytest.raises(UsageError, match="num_layers is 0"):
        describe_shape("tiny", 0)


def test_it_is_saved_as_a_checkpoint_that_others_load(tmp_path: Path) -> None:
    model = random_model("tiny", torch.float32, "cpu", num_layers=3)
    save_model(model, tmp_path / "tiny", source=describe_shape("tiny", 3))
    again = load_model(tmp_path / "tiny", dtype="fp32", device="cpu")
    assert again.config == model.config
    for (name, ours), theirs in zip(model.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(ours, theirs), name
    peer = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "tiny").eval()
    tokens = [5, 900, 17, 3]
    with torch.inference_mode():
        expected = peer(torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(all_logits(model, tokens), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.smoke
def test_an_unknown_shape_names_its_neighbours() -> None:
    with pytest.raises(UsageError, match=r"did you mean .*'llama-3\.1-8b'"):
        describe_shape("llama-3.1-8")
    with pytest.raises(UsageError, match="shape 'gpt' is unknown; choose from tiny, "):
        random_model("gpt", torch.float32, "cpu")
