"""Perplexity, divergence, intervals, the gate and the error of each layer."""

from __future__ import annotations

import copy
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from engines import engine_for, prompts_of, tiny
from tiny_models import make_model
from torch.nn import functional

from ridgeline.data.text_files import read_text
from ridgeline.engine.naive import OneSequence
from ridgeline.errors import ContextLengthError, NumericsError, UsageError
from ridgeline.models import Transformer
from ridgeline.quality import divergence as divergence_file
from ridgeline.quality.divergence import Original, divergence, kl_divergence
from ridgeline.quality.gate import QualityBounds
from ridgeline.quality.intervals import (
    Estimate,
    estimate,
    independent_count,
    mean_of,
    share_of,
    share_of_counts,
)
from ridgeline.quality.layers import NO_ERROR_DB, layer_errors
from ridgeline.quality.perplexity import increase, perplexity
from ridgeline.quality.windows import Windows, check_window, cut

NAME = "llama-tied"


def windows_of(*lengths: int) -> Windows:
    tokens = tuple(tuple(prompt) for prompt in prompts_of(list(lengths)))
    return Windows(tokens, tuple(3 * (len(part) - 1) for part in tokens))


def noisy(model: Transformer, *names: str, share: float = 0.05) -> Transformer:
    """A copy whose matrices of these names are a little wrong."""
    changed = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, weight in changed.named_parameters():
            if name in names:
                noise = torch.randn(weight.shape, generator=generator)
                weight.add_(noise * weight.std() * share)
    return changed


def logits_of(model: Transformer, tokens: tuple[int, ...]) -> torch.Tensor:
    sequence = OneSequence(model, len(tokens))
    sequence.begin(len(tokens), len(tokens))
    with torch.inference_mode():
        return model.logits(model(torch.tensor(tokens), sequence))[:-1].double()


# --- perplexity -----------------------------------------------------------------------------------


@pytest.mark.smoke
def test_perplexity_is_transformers() -> None:
    """Every token but a window's first counts once, whatever window it is in."""
    windows, peer, total = windows_of(128, 128, 17), make_model(NAME), 0.0
    for window in windows.tokens:
        ids = torch.tensor([window])
        with torch.inference_mode():
            logits = peer(ids).logits[0, :-1].double()
        total += float(functional.cross_entropy(logits, ids[0, 1:], reduction="sum"))
    found = perplexity(engine_for(tiny(NAME)), windows)
    assert found.perplexity.value == pytest.approx(math.exp(total / 270), rel=1e-6)
    assert found.total == pytest.approx(-total, rel=1e-6)
    assert found.num_tokens.tolist() == [127, 127, 16]
    assert found.bits_per_byte == pytest.approx(total / math.log(2) / 810, rel=1e-6)


def test_perplexity_goes_through_the_recipe() -> None:
    """An 8-bit KV cache must be seen, or the gate could not fail."""
    windows = windows_of(128, 100)
    plain = perplexity(engine_for(tiny(NAME)), windows)
    coarse = perplexity(engine_for(tiny(NAME), kv_dtype="int8"), windows)
    assert 1e-7 < abs(increase(plain, coarse).value) < 0.05


def test_what_is_no_number_is_an_error() -> None:
    model = noisy(tiny(NAME))
    with torch.no_grad():
        model.norm.weight[0] = math.nan
    with pytest.raises(NumericsError, match="NaN"):
        perplexity(engine_for(model), windows_of(9))
    with pytest.raises(NumericsError, match="NaN"):
        divergence(engine_for(tiny(NAME)), engine_for(model), windows_of(9))


# --- windows --------------------------------------------------------------------------------------


class Letters:
    """A tokenizer of one token a character."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        assert not add_special_tokens
        return [ord(letter) for letter in text]

    def token_bytes(self, token: int) -> bytes:
        return chr(token).encode()


def test_windows_do_not_overlap_and_the_last_is_short() -> None:
    found = cut("abcdefgé", Letters(), 3)  # type: ignore[arg-type]
    assert ["".join(map(chr, window)) for window in found.tokens] == ["abc", "def", "gé"]
    assert found.num_bytes == (2, 2, 2)
    assert found.num_scored == [2, 2, 1]
    assert len(cut("abcd", Letters(), 3).tokens) == 1  # type: ignore[arg-type]
    for text, window in (("a", 3), ("abc", 1)):
        with pytest.raises(UsageError, match="at least 2"):
            cut(text, Letters(), window)  # type: ignore[arg-type]


def test_first_bytes_cut_no_character(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes("aé€".encode())
    assert [read_text(path, size) for size in (1, 2, 3, 5, 6, None)] == [
        "a", "a", "aé", "aé", "aé€", "aé€"
    ]  # fmt: skip
    path.write_bytes(b"a\xe9bcdefgh")
    with pytest.raises(UsageError, match="UTF-8"):
        read_text(path, 5)


def test_a_window_may_be_the_context() -> None:
    engine = engine_for(tiny(NAME))
    check_window(engine, 128)
    assert perplexity(engine, windows_of(128)).perplexity.low is None
    with pytest.raises(ContextLengthError, match="window is 129"):
        check_window(engine, 129)


# --- divergence -----------------------------------------------------------------------------------


def test_divergence_is_its_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    original, windows = tiny(NAME), windows_of(70, 70, 70, 9)
    changed = noisy(original, "layers.1.mlp.down.weight", share=0.3)
    expected, differs = [], []
    for window in windows.tokens:
        wanted, found = logits_of(original, window), logits_of(changed, window)
        p = wanted.softmax(-1)
        expected += (p * (p.log() - found.log_softmax(-1))).sum(-1).tolist()
        differs += (wanted.argmax(-1) != found.argmax(-1)).tolist()
    found = None
    for kept_bytes in (2**30, 2 * 70 * 131 * 4, 1):  # all at once, two at a time, one
        monkeypatch.setattr(divergence_file, "KEPT_BYTES", kept_bytes)
        found = divergence(engine_for(original), engine_for(changed), windows)
        np.testing.assert_allclose(np.concatenate(found.kl), expected, atol=2e-5, rtol=1e-3)
    assert found is not None
    assert found.mean_kl.value == pytest.approx(np.mean(expected), rel=1e-4)
    assert found.p99_kl == pytest.approx(np.quantile(expected, 0.99), rel=1e-3)
    assert found.changed_share.value == pytest.approx(np.mean(differs))
    assert 0 < np.mean(differs) < 0.5
    assert found.mean_kl.low is not None
    assert found.mean_kl.low < found.mean_kl.value
    alone = perplexity(engine_for(changed), windows)
    assert found.changed.perplexity.value == pytest.approx(alone.perplexity.value, rel=1e-6)
    first = perplexity(engine_for(original), windows)
    assert found.increase == pytest.approx(increase(first, alone), rel=1e-4)


@pytest.mark.parametrize(("kept_bytes", "num_passes"), [(2**30, 1), (2 * 70 * 131 * 4, 4)])
def test_an_original_that_is_kept_runs_once(
    kept_bytes: int, num_passes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For two changed models: once where all windows fit, else each of two groups anew."""
    model, windows = tiny(NAME), windows_of(70, 70, 70, 9)
    engine, passes = engine_for(model), []
    score = engine.score
    monkeypatch.setattr(engine, "score", lambda *about: passes.append(1) or score(*about))
    original = Original(engine, windows, kept_bytes)
    for share in (0.3, 0.1):
        changed = noisy(model, "layers.1.mlp.down.weight", share=share)
        found = original.compare(engine_for(changed))
        alone = divergence(engine_for(model), engine_for(changed), windows)
        # Windows in groups are other batches, whose products may be summed in another order.
        assert found.mean_kl == pytest.approx(alone.mean_kl, rel=1e-5)
        assert found.increase == pytest.approx(alone.increase, rel=1e-5)
    assert len(passes) == num_passes


def test_a_model_does_not_diverge_from_itself() -> None:
    found = divergence(engine_for(tiny(NAME)), engine_for(tiny(NAME)), windows_of(40, 40))
    assert (found.mean_kl, found.changed_share) == ((0.0, 0.0, 0.0), (0.0, 0.0, 0.0))
    assert found.increase.value == 0.0


def test_what_the_original_rules_out_adds_nothing() -> None:
    original = torch.tensor([[0.0, 0.0, -math.inf]])
    changed = torch.tensor([[1.0, 1.0, -math.inf]])
    assert float(kl_divergence(original, changed)) == pytest.approx(0.0)


def test_vocabularies_must_be_the_same() -> None:
    other = engine_for(tiny("llama-wide-heads"))
    with pytest.raises(UsageError, match="vocabularies of 257 and 131"):
        divergence(engine_for(tiny(NAME)), other, windows_of(9))


# --- intervals ------------------------------------------------------------------------------------


def test_intervals_are_those_of_the_mean() -> None:
    values = np.random.default_rng(5).normal(10.0, 2.0, 400)
    found = mean_of(values)
    half = 1.96 * values.std() / 20
    assert found.value == pytest.approx(values.mean())
    assert found.low == pytest.approx(values.mean() - half, abs=0.03)
    assert found.high == pytest.approx(values.mean() + half, abs=0.03)
    assert mean_of(values) == found
    assert estimate(np.stack([values, values * 0 + 1], 1), lambda s: s[..., 0] / s[..., 1]) == found


def test_pairs_are_drawn_together() -> None:
    """Windows differ far more than models do: only the paired difference can see the models."""
    generator = np.random.default_rng(1)
    first = generator.normal(0.0, 10.0, 50)
    rows = np.stack([first, first + 0.1 + generator.normal(0, 0.01, 50), np.ones(50)], 1)
    found = estimate(rows, lambda sums: (sums[..., 1] - sums[..., 0]) / sums[..., 2])
    assert found.low is not None
    assert found.high is not None
    assert 0.09 < found.low < 0.1 < found.high < 0.11


def test_a_share_of_all_or_nothing_is_not_certain() -> None:
    none, every = share_of(np.zeros(5)), share_of(np.ones(5))
    assert none == (0.0, 0.0, pytest.approx(0.434, abs=1e-3))
    assert every == (1.0, pytest.approx(0.566, abs=1e-3), 1.0)
    some = np.array([1.0, 0.0, 1.0, 0.0])
    assert share_of(some) == mean_of(some)


def test_a_share_of_counts_has_wilsons_interval() -> None:
    assert share_of_counts(0, 20).low == 0.0
    assert share_of_counts(20, 20)[:2] == (1.0, pytest.approx(20 / (20 + 1.96**2)))
    found = share_of_counts(90, 100)
    assert found == (0.9, pytest.approx(0.8256, abs=1e-4), pytest.approx(0.9448, abs=1e-4))


def test_neighbours_that_are_alike_say_less() -> None:
    draw = np.random.default_rng(0).random(4000)
    assert independent_count(list(draw < 0.9)) == pytest.approx(4000, rel=0.1)
    runs = np.repeat(draw[:400] < 0.9, 10)  # ten in a row are the same
    assert independent_count(list(runs)) < 400
    assert independent_count([True] * 50) == 50


def test_one_unit_has_no_interval() -> None:
    assert mean_of(np.array([3.0])) == Estimate(3.0, None, None)


# --- the gate -------------------------------------------------------------------------------------


def test_the_gate_names_what_is_outside() -> None:
    changed = noisy(tiny(NAME), "layers.1.mlp.down.weight", share=0.3)
    found = divergence(engine_for(tiny(NAME)), engine_for(changed), windows_of(70, 70))
    kl, more = found.mean_kl.value, found.increase.value
    assert QualityBounds().broken_by(found) is None
    assert QualityBounds(max_kl=kl, max_ppl_increase=max(more, 0.0)).broken_by(found) is None
    problem = QualityBounds(max_kl=kl * 0.9).broken_by(found)
    assert problem is not None
    assert f"mean KL is {kl:.5f}" in problem
    assert "perplexity" not in problem
    back = divergence(engine_for(changed), engine_for(tiny(NAME)), windows_of(70, 70))
    worse = found if more > 0 else back
    problem = QualityBounds(max_ppl_increase=0.0).broken_by(worse)
    assert problem is not None
    assert "perplexity changes by +" in problem
    assert QualityBounds(max_ppl_increase=0.0).broken_by(back if more > 0 else found) is None


@pytest.mark.parametrize(
    ("bounds", "says"),
    [
        ({"max_kl": -0.1}, "max_kl is -0.1"),
        ({"max_kl": math.nan}, "max_kl is nan"),
        ({"max_ppl_increase": 2.0}, "200%"),
    ],
)
def test_bounds_that_make_no_sense(bounds: dict[str, float], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        QualityBounds(**bounds)


# --- layers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "weight", "part"),
    [
        ("llama-mha", "layers.1.mlp.down.weight", "layers.1.mlp.down"),
        ("gemma2", "layers.2.attn.qkv.weight", "layers.2.attn.qkv"),
        ("mixtral", "layers.0.mlp.gate_up", "layers.0.mlp"),
    ],
)
def test_the_layer_that_hurts_comes_first(name: str, weight: str, part: str) -> None:
    original = tiny(name)
    changed = noisy(original, weight, share=0.01)
    found = layer_errors(original, changed, prompts_of([40, 20]))
    block = ".".join(part.split(".")[:2])
    assert [entry.name for entry in found[:2]] == [block, part]
    assert (found[0].kind, found[1].kind) == ("block", "matrix")
    assert found[1].db < 60
    for entry in found[2:]:  # what is given the original's inputs and is the same, is right
        assert entry.db == NO_ERROR_DB, entry
    assert {entry.name for entry in found} >= {"head", "layers.0", "layers.0.attn.out"}


def test_a_layer_is_given_what_the_original_is() -> None:
    """An error before it does not change what is said of a layer."""
    original, weights = tiny("llama-mha"), [f"layers.{i}.mlp.down.weight" for i in (1, 0)]
    alone, both = noisy(original, weights[0]), noisy(original, *weights)
    with torch.no_grad():
        both.layers[1].mlp.down.weight.copy_(alone.layers[1].mlp.down.weight)
    found = [
        {entry.name: entry.db for entry in layer_errors(original, changed, prompts_of([40]))}
        for changed in (alone, both)
    ]
    assert found[0]["layers.0"] == NO_ERROR_DB > found[1]["layers.0"]
    assert found[0]["layers.1"] == found[1]["layers.1"] < 60
    assert found[0]["layers.1.mlp.down"] == found[1]["layers.1.mlp.down"]


def test_decibels() -> None:
    """Noise of a hundredth of the weights' size is 40 dB below the product."""
    original = tiny("llama-mha")
    changed = noisy(original, "head.weight", share=0.01)
    found = {entry.name: entry.db for entry in layer_errors(original, changed, prompts_of([60]))}
    assert found["head"] == pytest.approx(40.0, abs=1.0)
    half = noisy(original).to(torch.bfloat16)
    worst = layer_errors(original, half, prompts_of([60]))[0]
    assert 30 < worst.db < 60


def test_layers_need_the_same_shape() -> None:
    with pytest.raises(UsageError, match="different shapes"):
        layer_errors(tiny("llama-mha"), tiny("llama-tied"), prompts_of([5]))
