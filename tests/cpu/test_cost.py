"""Costs against what is built and run: parameters exactly, FLOPs within 1% of torch's count."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny_models import MODELS, make_model
from torch import Tensor
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from ridgeline.engine.naive import OneSequence
from ridgeline.kernels.attention import AttentionSpec
from ridgeline.models import Transformer, build_model, fill_random, transformer
from ridgeline.models.cost import (
    Chunk,
    MeanStep,
    angle_bytes,
    kv_bytes_per_token,
    mean_step_cost,
    num_active_parameters,
    num_parameters,
    step_cost,
)
from ridgeline.models.families import describe_hf
from ridgeline.models.shapes import describe_shape
from ridgeline.models.training_cost import KeptForm, activation_bytes, training_flops

EACH = sorted(MODELS)


def tiny(name: str) -> Transformer:
    peer_config = make_model(name).config
    values = peer_config.to_dict() | {"architectures": [f"{MODELS[name][0]}ForCausalLM"]}
    values["architectures"] = [values["architectures"][0].replace("Gemma3Text", "Gemma3")]
    return fill_random(build_model(describe_hf(values).config, torch.float32, "cpu"))


def llama_8b() -> Any:
    return describe_hf(
        {
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": 128256,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
        }
    ).config


@pytest.mark.parametrize("name", EACH)
def test_parameters_are_exact(name: str) -> None:
    model = tiny(name)
    assert num_parameters(model.config) == sum(p.numel() for p in model.parameters())
    assert num_parameters(model.config) == sum(p.numel() for p in make_model(name).parameters())


@pytest.mark.sweep(keep=29)
@pytest.mark.parametrize("name", EACH)
@pytest.mark.parametrize(("past", "new"), [(0, 21), (20, 1), (5, 8)])
def test_flops_match_torch(name: str, past: int, new: int) -> None:
    model = tiny(name)
    cache = OneSequence(model, past + new)
    tokens = torch.arange(past + new) % model.config.vocab_size
    with torch.inference_mode():
        if past:
            cache.begin(past, past)
            model(tokens[:past], cache)
            cache.end()
        with FlopCounterMode(display=False) as counter:
            cache.begin(new, past + new)
            model.logits(model(tokens[past:], cache)[-1:])
    cost = step_cost(model.config, [Chunk(new, past)], weight_bytes=4, kv_bytes=4)
    assert cost.dense_flops == pytest.approx(counter.get_total_flops(), rel=0.01)
    assert cost.flops <= cost.dense_flops


def brute_force_pairs(chunk: Chunk, window: int | None) -> int:
    return sum(
        min(position + 1, window or position + 1) for position in range(chunk.past, chunk.total)
    )


@pytest.mark.parametrize("window", [None, 1, 4, 7, 100])
@pytest.mark.parametrize(
    "chunk", [Chunk(1, 0), Chunk(9, 0), Chunk(1, 30), Chunk(6, 3), Chunk(5, 5)]
)
def test_seen_pairs_are_counted_one_by_one(chunk: Chunk, window: int | None) -> None:
    config = tiny("mistral-full").config
    config = replace(config, layers=tuple(replace(layer, window=window) for layer in config.layers))
    cost = step_cost(config, [chunk], weight_bytes=2, kv_bytes=2)
    pairs = brute_force_pairs(chunk, window)
    assert cost.attention_flops == 4 * config.q_size * pairs * config.num_layers


def test_causal_prefill_is_half() -> None:
    cost = step_cost(llama_8b(), [Chunk(4096, 0)], weight_bytes=2, kv_bytes=2)
    assert cost.attention_flops == pytest.approx(cost.dense_attention_flops / 2, rel=1e-3)


def test_the_8b_shape() -> None:
    """Figures known from elsewhere: 8.03 G parameters, 15.0 GB read a token, 131,072 bytes of KV a
    token.
    """
    config = llama_8b()
    assert num_parameters(config) == 8_030_261_248
    cost = step_cost(config, [Chunk(1, 0)], weight_bytes=2, kv_bytes=2)
    assert cost.weight_bytes == pytest.approx(15.0e9, rel=0.01)
    assert cost.matrix_flops == pytest.approx(15.0e9, rel=0.01)
    assert kv_bytes_per_token(config, 2) == 131072
    at_32k = step_cost(config, [Chunk(1, 32767)], weight_bytes=2, kv_bytes=2)
    assert at_32k.kv_read_bytes == 32768 * 131072


def test_batched_decode_reads_weights_once() -> None:
    config = llama_8b()
    one = step_cost(config, [Chunk(1, 100)], weight_bytes=2, kv_bytes=2)
    many = step_cost(config, [Chunk(1, 100)] * 64, weight_bytes=2, kv_bytes=2)
    assert many.weight_bytes == pytest.approx(one.weight_bytes, rel=1e-4)
    assert many.kv_read_bytes == 64 * one.kv_read_bytes
    assert many.flops == 64 * one.flops


def test_means_of_steps_cost_what_the_steps_did() -> None:
    """Exact without windows and experts, whatever the steps were."""
    config = llama_8b()
    steps = [[Chunk(1, 100), Chunk(1, 3)], [Chunk(200, 0), Chunk(1, 7), Chunk(31, 64)]]
    chunks = [chunk for step in steps for chunk in step]
    mean = MeanStep(
        rows=len(chunks) / 2,
        tokens=sum(chunk.new for chunk in chunks) / 2,
        logit_rows=len(chunks) / 2,
        pairs=sum(brute_force_pairs(chunk, None) for chunk in chunks) / 2,
        keys=sum(chunk.total for chunk in chunks) / 2,
    )
    found = mean_step_cost(config, mean, weight_bytes=2, kv_bytes=1)
    each = [step_cost(config, step, weight_bytes=2, kv_bytes=1) for step in steps]
    for name in ("matrix_flops", "attention_flops", "weight_bytes", "kv_read_bytes"):
        assert getattr(found, name) == pytest.approx(sum(getattr(cost, name) for cost in each) / 2)
    assert found.bytes == pytest.approx(sum(cost.bytes for cost in each) / 2)


def test_a_mean_beyond_the_window_is_exact_too() -> None:
    config = tiny("mistral-sliding").config
    window = config.layers[0].window
    assert window is not None
    chunk = Chunk(1, 5 * window)
    mean = MeanStep(rows=1, tokens=1, logit_rows=1, pairs=chunk.total, keys=chunk.total)
    found = mean_step_cost(config, mean, weight_bytes=2, kv_bytes=2)
    exact = step_cost(config, [chunk], weight_bytes=2, kv_bytes=2)
    assert (found.bytes, found.flops) == (exact.bytes, exact.flops)


def test_experts_read_grow_with_tokens_and_end_at_all() -> None:
    config = tiny("mixtral").config
    read = [
        step_cost(config, [Chunk(n, 0)], weight_bytes=1, kv_bytes=1).weight_bytes
        - min(n, config.vocab_size) * config.hidden_size
        for n in (1, 2, 8, 200)
    ]
    assert read == sorted(read)
    assert read[0] == pytest.approx(num_active_parameters(config))
    everything = num_parameters(config) - config.vocab_size * config.hidden_size
    assert read[-1] == pytest.approx(everything)


# Activations: the same model with ops that keep exactly what the fused ones keep, and torch's own
# list of the tensors saved for the backward pass.


class KeepsInput(torch.autograd.Function):
    """Any op of one tensor and a parameter that saves its input and nothing else."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, result: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x)
        return result.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return torch.zeros_like(ctx.saved_tensors[0]), None


class KeepsNothing(KeepsInput):
    @staticmethod
    def forward(ctx: Any, x: Tensor, result: Tensor) -> Tensor:  # type: ignore[override]
        return result.clone()


class KeepsQkvOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # type: ignore[override]
        out = torch.randn_like(q)
        sums = torch.zeros(q.shape[:2])
        ctx.save_for_backward(q, k, v, out, sums)
        return out


FUSED = {"rms_norm": KeepsInput, "gated_activation": KeepsInput, "rotate": KeepsNothing}


def as_fused(op: Any, keeps: Any) -> Any:
    """The op with its own values, and for the backward pass only what `keeps` keeps."""

    def fused(x: Tensor, *rest: Any) -> Tensor:
        with torch.no_grad():
            result = op(x, *rest)
        return keeps.apply(x, result)

    return fused


class TrainingSequences:
    def __init__(self, tokens: int) -> None:
        self.positions_T = torch.arange(tokens)
        self.lengths_T = torch.full((tokens,), tokens)

    def attend(
        self, layer: int, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, spec: AttentionSpec
    ) -> Tensor:
        # v is a view of qkv's output: copied here so that it alone is kept, as a fused rotation
        # does
        return KeepsQkvOut.apply(q_TNH, k_TKH, v_TKH.clone())


@pytest.mark.parametrize("name", ["llama-mha", "llama-wide-heads", "qwen3", "gemma2"])
def test_activation_bytes_match_what_autograd_keeps(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny(name).requires_grad_(True)
    tokens = 64
    for op, keeps in FUSED.items():
        monkeypatch.setattr(transformer, op, as_fused(getattr(transformer, op), keeps))
    kept: dict[int, int] = {}
    alive = []

    def note(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, torch.nn.Parameter) and tensor.is_floating_point():
            kept[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
            alive.append(tensor)  # or its address could be given to another
        return tensor

    parameters = {p.data_ptr() for p in model.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        hidden = model(torch.arange(tokens) % model.config.vocab_size, TrainingSequences(tokens))
        functional.cross_entropy(model.head(hidden), torch.zeros(tokens, dtype=torch.int64))
    measured = sum(size for pointer, size in kept.items() if pointer not in parameters)
    expected = activation_bytes(model.config, tokens, KeptForm(4))
    expected += tokens * (4 * model.config.vocab_size - angle_bytes(model.config) - 8)
    assert expected == pytest.approx(measured, rel=0.02)


def test_recomputation_keeps_less() -> None:
    config = llama_8b()
    kept = [
        activation_bytes(config, 1, KeptForm(2, level))
        for level in ("none", "elementwise", "attention", "blocks")
    ]
    assert kept == sorted(kept, reverse=True)
    # A token of an 8B shape: 4.46 MB with everything kept, 3.0 without norms and activations.
    assert kept[0] == pytest.approx(4.46e6, rel=0.01)
    assert kept[1] == pytest.approx(3.02e6, rel=0.01)
    assert kept[3] == pytest.approx(2 * 2 * 4096 * 32, rel=0.05)
    in_fp8 = activation_bytes(config, 1, KeptForm(2, fp8=True))
    codes = 32 * (2 * 4096 + 4096 + 14336)  # of products' inputs, attention's output twice
    assert in_fp8 == kept[1] + codes


def test_training_counts_what_the_gradients_need() -> None:
    """A document sees itself alone, a window ends what it sees, and a token without a target
    needs no head.
    """
    config = describe_shape("llama-3.2-1b").config
    matrices = num_active_parameters(config) - (2 * config.num_layers + 1) * config.hidden_size
    flops = training_flops(config, [4096] * 8, 8 * 4096)
    assert flops.layers + flops.head == pytest.approx(6 * matrices * 8 * 4096)
    pairs = 8 * 4096 * 4097 / 2
    assert flops.attention == 12 * config.q_size * pairs * config.num_layers
    assert flops.total / (8 * 4096) == pytest.approx(8.23e9, rel=0.002)  # 65.6k tok/s: 54.6% MFU
    cut = training_flops(config, [2048] * 16, 8 * 4096)
    assert cut.layers == flops.layers
    assert cut.attention == pytest.approx(flops.attention / 2, rel=0.001)
    half = training_flops(config, [4096] * 8, 4 * 4096)
    assert (half.head, half.layers) == (flops.head / 2, flops.layers)
    seen = replace(config, layers=tuple(replace(each, window=64) for each in config.layers))
    assert training_flops(seen, [4096], 1).attention < flops.attention / 8 / 30
