"""Quantizing a model block by block: folding, resuming, experts, keys and values, and what is
refused.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from calibrated import outlier_model, token_batches
from test_families import PROMPT, all_logits
from tiny_models import one_of_each_family
from tiny_models import save_model as save_peer

from ridgeline.engine.naive import OneSequence
from ridgeline.errors import CheckpointError, UsageError
from ridgeline.models.transformer import RMSNorm, Transformer
from ridgeline.progress import Progress
from ridgeline.quantization import load_model
from ridgeline.quantization.blocks import BlockWalk
from ridgeline.quantization.calibrating.calibration import quantize_model
from ridgeline.quantization.calibrating.work import Results, dequantized
from ridgeline.quantization.methods import Awq, Gptq, Method, Rtn, SmoothQuant, SparseGpt, Wanda
from ridgeline.quantization.methods.base import Calibrated
from ridgeline.quantization.methods.folding import _divide_norm, channel_sites, fold
from ridgeline.quantization.methods.kv import calibrate_kv
from ridgeline.quantization.methods.usual import usual_method
from ridgeline.quantization.scheme import Codes, Scheme, decode, encode, find_grid, parse_scheme
from ridgeline.quantization.statistics import Statistics, collect, matrices

FAMILIES = one_of_each_family("llama-mqa-bias", "qwen2", "mixtral", "phi3", "smollm3")
FAMILIES += ["qwen3", "qwen3-moe", "granite"]  # and a second shape


@pytest.mark.parametrize("name", FAMILIES)
def test_folding_leaves_the_function(name: str, tmp_path: Path) -> None:
    """Random scales at every place of every block: the same logits in fp32."""
    save_peer(name, tmp_path)
    model = load_model(tmp_path, dtype="fp32", device="cpu")
    before = all_logits(model, PROMPT)
    changed = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(0)
    for block in changed.layers:
        weights = {key: value.clone() for key, value in matrices(block).items()}
        seen = {key: Statistics(w.shape[1], w.device) for key, w in weights.items()}
        calibrated = Calibrated(block, weights, seen, dict.fromkeys(weights), 0)
        for place in channel_sites(block):
            size = len(place.shared(seen[place.readers[0]].amax_D))
            fold(calibrated, place, torch.exp(0.7 * torch.randn(size, generator=generator)))
        for key, target in matrices(block).items():
            assert not torch.equal(target, calibrated.weights[key]), key
            target.copy_(calibrated.weights[key])
    torch.testing.assert_close(all_logits(changed, PROMPT), before, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_a_norm_in_bf16_loses_nothing(offset: float) -> None:
    norm = RMSNorm(256, 1e-6, offset).to(torch.bfloat16).requires_grad_(False)
    norm.weight.copy_(torch.randn(256, generator=torch.Generator().manual_seed(0)))
    norm.weight[3] = -offset  # a channel that is silent already
    gain = norm.weight.float() + offset
    asked = torch.exp(torch.randn(256, generator=torch.Generator().manual_seed(1)))
    scale = _divide_norm(norm, asked)
    torch.testing.assert_close((norm.weight.float() + offset) * scale, gain, rtol=1e-6, atol=0)
    assert ((scale / asked - 1).abs() < 0.1).float().mean() > 0.9
    assert scale.isfinite().all()


def test_statistics_are_those_of_the_inputs() -> None:
    """Of a matrix behind a norm, of one behind attention, and of experts by their tokens."""
    model, batches = outlier_model(experts=4), token_batches()
    walk = BlockWalk(model, batches)
    found = collect(walk.copy_block(0), walk)
    block, x_TD = model.layers[0], torch.cat(walk.inputs)
    normed = block.attn_norm(x_TD)
    qkv = found["attn.qkv.weight"]
    torch.testing.assert_close(qkv.hessian_DD, normed.t() @ normed, rtol=1e-4, atol=1e-2)
    torch.testing.assert_close(qkv.amax_D, normed.abs().amax(0))
    torch.testing.assert_close(qkv.sum_D, normed.abs().sum(0), rtol=1e-4, atol=1e-3)
    assert qkv.num_tokens == len(x_TD) == found["mlp.router.weight"].num_tokens
    assert sum(found[f"mlp.down.{e}"].num_tokens for e in range(4)) == 2 * len(x_TD)
    assert len(qkv.sample_SD) == len(x_TD)


def test_the_walk_is_the_model() -> None:
    """Blocks one after the other give what the whole model gives, each sequence by itself."""
    model, batches = outlier_model(), token_batches(2)
    walk = BlockWalk(model, batches, keep_on_host=True)
    for index in range(2):
        walk.advance(walk.copy_block(index))
    for batch, out_TD in zip(batches, walk.inputs, strict=True):
        for row, tokens in enumerate(batch.tolist()):
            logits = model.logits(model.norm(out_TD.view(4, 24, -1)[row]))
            torch.testing.assert_close(logits, all_logits(model, tokens), atol=1e-4, rtol=1e-4)


def mean_db(results: Results) -> float:
    errors = [report.error_db for report in results.reports if report.error_db is not None]
    return sum(errors) / len(errors)


@pytest.mark.parametrize(
    ("scheme", "better", "experts"),
    [
        ("int4-g32", Gptq(), 0),
        ("int4-g32", Awq(points=6, then=Rtn()), 0),
        ("int4-g32", Awq(points=4, then=Rtn()), 4),
        ("int4-g32-asym", Awq(points=4, then=Gptq(clip=False)), 0),
        ("w8a8-int8", SmoothQuant(), 0),
        ("w8a8-int8", SmoothQuant(alpha=0.5), 4),
        ("fp8", usual_method(parse_scheme("fp8")), 0),
    ],
    ids=repr,
)
def test_methods_beat_rounding(scheme: str, better: Method, experts: int) -> None:
    model, batches = outlier_model(experts), token_batches()
    asked = parse_scheme(scheme)
    plain = quantize_model(model, batches, asked, Rtn(), min_tokens=8)
    found = quantize_model(model, batches, asked, better, min_tokens=8)
    assert mean_db(found) < mean_db(plain) - 1.0
    assert {report.method for report in found.reports} == {better.name}


def test_what_is_usual_for_a_scheme() -> None:
    names = {"int8": "rtn", "int4-g32": "gptq", "w8a8-int8": "smoothquant", "fp8": "smoothquant"}
    assert {name: usual_method(parse_scheme(name)).name for name in names} == names
    for name in ("fp8", "fp8-tensor", "fp8-block"):
        method = usual_method(parse_scheme(name))
        assert isinstance(method, SmoothQuant)
        assert isinstance(method.then, Gptq), name
        assert method.sees_original, name


def test_the_result_is_what_was_asked() -> None:
    model = outlier_model()
    before = {name: value.clone() for name, value in model.named_parameters()}
    scheme = parse_scheme("int8")
    results = quantize_model(model, token_batches(1), scheme, Rtn())
    for name, value in model.named_parameters():
        assert torch.equal(value, before[name]), name  # the model is as it was
    found = dict(results.tensors())
    assert len(found) == 2 * 4
    made = dict(dequantized(model, results).named_parameters())
    for name, codes in found.items():
        assert isinstance(codes, Codes)
        expected = encode(before[name], find_grid(before[name], scheme), scheme)
        assert torch.equal(codes.values, expected.values)
        assert torch.equal(made[name], decode(expected, scheme))
    assert torch.equal(made["layers.1.attn_norm.weight"], before["layers.1.attn_norm.weight"])


def test_each_matrix_may_have_its_own_scheme() -> None:
    """Down stays, attention is int8, and what a scheme does not fit is said to stay."""
    model = outlier_model()

    def scheme_of(name: str) -> Scheme | None:
        if "down" in name:
            return None
        return parse_scheme("int8" if "attn" in name else "int4-g128")

    results = quantize_model(
        model, token_batches(1), scheme_of, SmoothQuant(alpha=0.5), min_tokens=8
    )
    rows = {report.name.removeprefix("layers.0."): report for report in results.reports[:4]}
    assert rows["attn.qkv.weight"].scheme == "int8"
    assert rows["mlp.down.weight"].scheme is None
    assert not rows["mlp.down.weight"].note
    assert "int4-g128" in rows["mlp.gate_up.weight"].note
    assert set(results.layer(0).codes) == {"attn.qkv.weight", "attn.out.weight"}
    assert distance(model, dequantized(model, results)) < 0.2
    results.layer(0).floats.clear()  # what was folded, and is not quantized, matters
    assert distance(model, dequantized(model, results)) > 0.4


def distance(model: Transformer, other: Transformer) -> float:
    wanted, got = (all_logits(each, list(range(30))) for each in (model, other))
    return float((got - wanted).norm() / wanted.norm())


def test_pruning_leaves_floats() -> None:
    model = outlier_model()
    for method in (Wanda(), SparseGpt()):
        results = quantize_model(model, token_batches(1), None, method, min_tokens=8)
        for name, kept in results.tensors():
            assert isinstance(kept, torch.Tensor)
            assert ((kept.unflatten(1, (-1, 4)) == 0).sum(-1) == 2).all(), name
        assert len(list(results.tensors())) == 8


def test_experts_with_few_tokens_are_rounded_and_said_so() -> None:
    model, batches = outlier_model(experts=6), token_batches(1)
    results = quantize_model(model, batches, parse_scheme("int4-g32"), Gptq(), min_tokens=34)
    rows = [report for report in results.reports if "mlp" in report.name]
    few = [row for row in rows if row.num_tokens < 34]
    assert len(rows) == 2 * 2 * 6
    assert 0 < len(few) < len(rows)
    for row in rows:
        assert (row.method == "rtn") == (row in few) == ("tokens were seen" in row.note)
        assert row.scheme == "int4-g32"


class StoppedError(Exception):
    pass


def stop_after(steps: int) -> Progress:
    def progress(label: str, done: int, total: int) -> None:
        if done == steps:
            raise StoppedError

    return progress


def files(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.rglob("*.safetensors"))}


@pytest.mark.parametrize("method", [Gptq(clip=False), Awq(points=3, then=Rtn())], ids=repr)
def test_a_stopped_run_goes_on_to_the_same_bytes(method: Method, tmp_path: Path) -> None:
    model, scheme = outlier_model(layers=3), parse_scheme("int4-g32-asym")
    quantize_model(model, token_batches(), scheme, method, work=tmp_path / "whole")
    # A layer is 3 batches, 4 matrices and 3 batches: this is in the middle of the second.
    with pytest.raises(StoppedError):
        quantize_model(
            model, token_batches(), scheme, method, work=tmp_path / "cut", progress=stop_after(15)
        )
    (first,) = (tmp_path / "cut").rglob("*.safetensors")
    written = first.stat().st_mtime_ns
    told: list[tuple[int, int]] = []
    again = quantize_model(
        model,
        token_batches(),
        scheme,
        method,
        work=tmp_path / "cut",
        progress=lambda label, done, total: told.append((done, total)),
    )
    assert first.stat().st_mtime_ns == written
    in_memory = quantize_model(model, token_batches(), scheme, method)
    assert in_memory.reports == again.reports
    assert len(again.reports) == 3 * 4
    assert files(tmp_path / "cut") == files(tmp_path / "whole")
    assert len(files(tmp_path / "whole")) == 3
    assert told == sorted(told)
    assert told[-1] == (20, 20)  # two layers anew, and the first one's outputs again


def test_what_the_original_hands_on_may_be_asked_for(tmp_path: Path) -> None:
    """The second block's codes are then those of a model whose first block stays; a stopped run
    goes on to the same bytes.
    """
    model, scheme = outlier_model(layers=3), parse_scheme("int4-g32")
    method = SmoothQuant(alpha=0.5, then=Gptq(clip=False), on_original=True)
    folder, told = tmp_path / "cut", list[tuple[int, int]]()
    with pytest.raises(StoppedError):  # a layer is 3 batches and 4 matrices
        quantize_model(model, token_batches(), scheme, method, work=folder, progress=stop_after(10))
    found = quantize_model(
        model,
        token_batches(),
        scheme,
        method,
        work=folder,
        progress=lambda label, done, total: told.append((done, total)),
    )
    assert told[0] == (1, 17)  # the first layer's outputs again, two layers anew
    assert told[-1] == (17, 17)
    quantize_model(model, token_batches(), scheme, method, work=tmp_path / "whole")
    assert files(folder) == files(tmp_path / "whole")
    rounded = quantize_model(model, token_batches(), scheme, replace(method, on_original=False))

    def only_last(name: str) -> Scheme | None:
        return scheme if name.startswith("layers.2.") else None

    alone = quantize_model(model, token_batches(), only_last, replace(method, on_original=False))
    key = "mlp.down.weight"
    ours, theirs, other = (each.layer(2).codes[key] for each in (found, alone, rounded))
    assert torch.equal(ours.values, theirs.values)
    assert not torch.equal(ours.values, other.values)


def test_what_decides_the_result_decides_the_folder(tmp_path: Path) -> None:
    model, scheme = outlier_model(layers=1), parse_scheme("int8")
    other = copy.deepcopy(model)
    other.layers[0].attn.out.weight[1, 1] += 1e-3
    quantize_model(model, token_batches(1), scheme, Rtn(), work=tmp_path)
    quantize_model(model, token_batches(1), scheme, Rtn(), work=tmp_path)
    assert len(list(tmp_path.iterdir())) == 1
    quantize_model(other, token_batches(1), scheme, Rtn(), work=tmp_path)
    quantize_model(model, token_batches(2), scheme, Rtn(), work=tmp_path)
    quantize_model(model, token_batches(1), scheme, Rtn(clip=True), work=tmp_path)
    quantize_model(model, token_batches(1), parse_scheme("fp8"), Rtn(), work=tmp_path)
    assert len(list(tmp_path.iterdir())) == 5


def test_what_is_refused(tmp_path: Path) -> None:
    model, scheme = outlier_model(), parse_scheme("int8")
    model.layers[1].mlp.down.weight[3, 3] = float("nan")
    model.norm.weight[0] = float("inf")
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.down\.weight, norm\.weight"):
        quantize_model(model, token_batches(), scheme, Rtn(), work=tmp_path)
    assert not list(tmp_path.iterdir())
    model = outlier_model()
    with pytest.raises(UsageError, match="no tokens"):
        quantize_model(model, [], scheme, Rtn())
    with pytest.raises(UsageError, match="vocabulary of 96"):
        quantize_model(model, [torch.tensor([5, 96])], scheme, Rtn())
    with pytest.raises(UsageError, match="shape"):
        quantize_model(model, [torch.rand(2, 3)], scheme, Rtn())
    with pytest.raises(UsageError, match="give a scheme"):
        quantize_model(model, token_batches(), None, Gptq())


def cached(model: Transformer, tokens: list[int]) -> OneSequence:
    sequence = OneSequence(model, len(tokens))
    sequence.begin(len(tokens), len(tokens))
    with torch.inference_mode():
        model(torch.tensor(tokens), sequence)
    return sequence


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_scales_of_keys_and_values(dtype: torch.dtype) -> None:
    """Each head's largest key and value just find room, as the plain loop's cache has them."""
    model, batches = outlier_model(), token_batches(2)
    scales = calibrate_kv(model, batches, dtype)
    caches = [cached(model, tokens) for batch in batches for tokens in batch.tolist()]
    keys = torch.stack([cache.keys_LSKH for cache in caches]).abs().amax((0, 2, 4))
    values = torch.stack([cache.values_LSKH for cache in caches]).abs().amax((0, 2, 4))
    largest = 127 if dtype == torch.int8 else 448
    torch.testing.assert_close(scales.keys * largest, keys, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(scales.values * largest, values, rtol=1e-4, atol=1e-5)
    assert torch.equal(scales.per_layer()[0], scales.keys.amax(1))
    assert all(-60 < error < -25 for error in (*scales.keys_db, *scales.values_db))
    with pytest.raises(UsageError, match="int8, fp8_e4m3"):
        calibrate_kv(model, batches, torch.bfloat16)
