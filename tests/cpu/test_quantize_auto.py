"""`ridgeline quantize --auto` on a small model with one layer that rounding hurts: it stays larger
than the others, the bound holds, and what is saved has a scheme for each layer.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from command_line import make_folder, refused
from safetensors.torch import load_file, save_file
from written_text import TEXT

from ridgeline.cli import main
from ridgeline.cli.tables.quantize import ranges
from ridgeline.data import Tokenizer
from ridgeline.data.calibration_text import calibration_batches
from ridgeline.engine import Engine
from ridgeline.errors import QualityError, RidgelineError, UsageError
from ridgeline.hardware.units import human_bytes, parse_bytes
from ridgeline.ladder.quantizing.auto import Auto, possible, quantize_auto, usual_schemes
from ridgeline.ladder.quantizing.quantize_job import QuantizeJob, QuantizeResult, quantize, save
from ridgeline.ladder.quantizing.sensitivity import sensitivity, some_of
from ridgeline.models import Transformer
from ridgeline.models.transformer import Linear
from ridgeline.quality.gate import QualityBounds
from ridgeline.quantization import load_model
from ridgeline.quantization.calibrating.calibration import quantize_model
from ridgeline.quantization.choose import LayerChoice, ProductTimes
from ridgeline.quantization.linear import QuantizedLinear, quantizable
from ridgeline.quantization.methods import Awq, Method, Rtn, Wanda
from ridgeline.quantization.scheme import parse_scheme
from ridgeline.quantization.sizes import MatrixSize

HURT = "layers.1.mlp.down"
INT8, INT4 = parse_scheme("int8"), parse_scheme("int4-g32")
NO_ROOM = ["--max-kl", "0", "--max-ppl-increase", "0"]
ALL = QualityBounds(max_kl=100.0, max_ppl_increase=None)
SHORTER = TEXT[:40_000]
JOB = QuantizeJob(None, Rtn(), num_sequences=4, text=SHORTER[:2000], window=60, bounds=ALL)


@pytest.fixture(autouse=True)
def shorter_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """The default calibration text is half a megabyte, which takes longest of all to tokenize."""
    monkeypatch.setattr("ridgeline.ladder.quantizing.quantize_job.default_text", lambda: SHORTER)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One matrix has in each group a large weight, whose input is small: in 4 bits the others
    become zero, while the model is what it was.
    """
    path = tmp_path_factory.mktemp("model")
    make_folder(path, hidden_size=64, intermediate_size=96, num_hidden_layers=3)
    tensors = load_file(path / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][::32] /= 30
    tensors["model.layers.1.mlp.down_proj.weight"][:, ::32] *= 30
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


@pytest.fixture(scope="module")
def model(folder: Path) -> Transformer:
    return load_model(folder, dtype="fp32", device="cpu")


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.load(folder)


@pytest.fixture(scope="module")
def half(model: Transformer, tokenizer: Tokenizer) -> QualityBounds:
    """Half of what 4 bits everywhere cost."""
    whole = quantize(model, tokenizer, replace(JOB, scheme=INT4)).quality.mean_kl.value
    return QualityBounds(max_kl=whole / 2, max_ppl_increase=0.99)


@pytest.fixture(scope="module")
def found(model: Transformer, tokenizer: Tokenizer, half: QualityBounds) -> QuantizeResult:
    job = replace(JOB, bounds=half)
    return quantize_auto(model, tokenizer, job, Auto((INT8, INT4)))


def test_the_sensitive_layer_is_found(model: Transformer, tokenizer: Tokenizer) -> None:
    batches = calibration_batches(tokenizer, SHORTER, num_sequences=4)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    asked = {name: [INT8, INT4] for name in quantizable(model)} | {"layers.0.attn.out": []}
    costs = sensitivity(model, batches, asked)
    assert costs.keys() == set(asked) - {"layers.0.attn.out"}
    assert max(costs, key=lambda name: costs[name]["int4-g32"]) == HURT
    assert all(0 < cost["int8"] < cost["int4-g32"] / 10 for cost in costs.values())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    alone = sensitivity(model, batches, {HURT: [INT8]})[HURT]["int8"]
    assert alone == pytest.approx(costs[HURT]["int8"], rel=0.5)  # measured, and by its error


def test_a_little_of_the_text_is_enough() -> None:
    tokens = [torch.zeros(8, 512, dtype=torch.int64)] * 3
    assert [tuple(part.shape) for part in some_of(tokens, on_gpu=False)] == [(1, 256)]
    assert sum(part.numel() for part in some_of(tokens, on_gpu=True)) == 2048
    short = [torch.zeros(100, dtype=torch.int64)] * 9
    assert sum(part.numel() for part in some_of(short, on_gpu=False)) == 256


def test_a_mixture_inside_the_bound(
    found: QuantizeResult, half: QualityBounds, model: Transformer
) -> None:
    places = {place.name: place for place in found.places}
    assert found.problem is None
    assert found.quality.mean_kl.value <= (half.max_kl or 0)
    assert places.keys() == quantizable(model).keys()
    assert places[HURT].scheme != "int4-g32"
    assert "int4-g32 would cost" in places[HURT].why
    smallest = [name for name, place in places.items() if place.scheme == "int4-g32"]
    assert len(smallest) >= len(places) // 2
    assert places[smallest[0]].why == "the smallest that fits"
    plain = sum(p.nbytes for p in model.parameters())
    saved = sum(model.get_submodule(name).weight.nbytes - places[name].num_bytes for name in places)
    assert found.weight_bytes == plain - saved
    assert 1 < len(found.trials) <= 8
    assert found.weight_bytes == min(
        trial.weight_bytes for trial in found.trials if trial.mean_kl <= (half.max_kl or 0)
    )


def test_what_is_saved_has_each_layers_scheme(
    found: QuantizeResult, folder: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    save(found, out, source=folder, tokenizer=tokenizer)
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    groups = config["config_groups"].values()
    stored = {(one["weights"]["num_bits"], len(one["targets"])) for one in groups}
    pieces = {"attn.qkv": 3, "attn.out": 1, "mlp.gate_up": 2, "mlp.down": 1}
    by_bits = {8: 0, 4: 0}
    for place in found.places:
        if place.scheme is not None:
            bits = parse_scheme(place.scheme).bits
            by_bits[bits] += pieces[place.name.partition(".")[2].partition(".")[2]]
    assert stored == {(bits, count) for bits, count in by_bits.items() if count}
    assert len(stored) == 2
    loaded = Engine(out, device="cpu").model
    for place in found.places:
        layer = loaded.get_submodule(place.name)
        if place.scheme is None:
            assert type(layer) is Linear
        else:
            assert isinstance(layer, QuantizedLinear)
            assert layer.scheme.name == place.scheme
    pytest.importorskip("compressed_tensors")
    peer = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    tokens = tokenizer.encode("What other engines make of the mixture is the same.")
    with torch.inference_mode():
        theirs = peer(torch.tensor([tokens])).logits[0].log_softmax(-1)
    engine = Engine(out, device="cpu")
    (ours,) = engine.score([tokens], lambda first, logits, ids: logits.log_softmax(-1))
    torch.testing.assert_close(ours, theirs[:-1], atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize("method", [Rtn(), Awq(points=2)], ids=["rtn", "awq"])
def test_one_scheme_and_what_stays(
    method: Method,
    model: Transformer,
    tokenizer: Tokenizer,
    half: QualityBounds,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The whole is tried first, the sensitive layer stays, and codes that depend on nothing else
    are found once.
    """
    calibrated = []

    def counted(*about: Any, **more: Any) -> Any:
        calibrated.append(1)
        return quantize_model(*about, **more)

    monkeypatch.setattr("ridgeline.ladder.quantizing.quantize_job.quantize_model", counted)
    bounds = half
    if method.folds:  # which keeps large weights whole: a bound of its own
        whole = quantize(model, tokenizer, replace(JOB, scheme=INT4, method=method))
        bounds = QualityBounds(max_kl=whole.quality.mean_kl.value / 2)
        calibrated.clear()
    job = replace(JOB, bounds=bounds, method=method)
    found = quantize_auto(model, tokenizer, job, Auto((INT4,)))
    assert found.problem is None
    assert found.quality.mean_kl.value <= (bounds.max_kl or 0)
    assert found.trials[0].left == 0
    assert found.trials[0].mean_kl > (bounds.max_kl or 0)
    assert 0 < len(found.stays) < len(found.codes)
    assert {scheme.name for _, scheme in found.codes.values()} == {"int4-g32"}
    assert {row.name for row in found.reports if row.scheme} == {f"{n}.weight" for n in found.codes}
    assert len(calibrated) == (len(found.trials) if method.folds else 0)
    if not method.folds:
        assert HURT in found.stays


def test_one_scheme_inside_the_bound_needs_no_search(
    model: Transformer, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ridgeline.ladder.quantizing.auto.sensitivity", None)
    job = replace(JOB, skip=(HURT,))
    found = quantize_auto(model, tokenizer, job, Auto((INT8,)))
    assert found.stays == (HURT,)
    assert len(found.trials) == 1
    assert {place.kl for place in found.places} == {None}
    same = quantize(model, tokenizer, replace(job, scheme=INT8))
    assert found.quality.mean_kl == same.quality.mean_kl
    assert [row.name for row in found.reports] == [r.name for r in same.reports if r.scheme]


def test_budgets_that_cannot_be_met(
    model: Transformer,
    tokenizer: Tokenizer,
    half: QualityBounds,
    found: QuantizeResult,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = replace(JOB, bounds=half)
    auto = Auto((INT8, INT4), memory=100_000)
    with pytest.raises(UsageError, match=r"smallest mixture of int8, int4-g32 takes \d+ KiB"):
        quantize_auto(model, tokenizer, job, auto)
    with pytest.raises(QualityError, match="none of the 1 mixtures measured is inside"):
        quantize_auto(
            model, tokenizer, replace(job, bounds=QualityBounds(max_kl=0.0)), Auto((INT4,))
        )
    with pytest.raises(UsageError, match="wanda prunes"):
        quantize_auto(model, tokenizer, replace(job, method=Wanda()), auto)
    monkeypatch.setattr("ridgeline.ladder.quantizing.auto._search", lambda *about: found)
    tight = replace(auto, memory=found.weight_bytes - 1)
    with pytest.raises(QualityError, match=f"takes {human_bytes(found.weight_bytes)}"):
        quantize_auto(model, tokenizer, job, tight)
    enough = replace(auto, memory=found.weight_bytes)
    assert quantize_auto(model, tokenizer, job, enough).codes == found.codes


def test_what_is_slower_is_no_candidate(model: Transformer) -> None:
    shape = MatrixSize(*model.get_submodule(HURT).weight.shape)
    slow = {("int8", shape): LayerChoice(*shape, "int8", (ProductTimes(1, 1.0, 2.0),))}
    known = possible(model, (INT8, INT4), ("layers.0.*",), slow)
    assert known[HURT] == [INT4]
    assert known["layers.1.attn.qkv"] == [INT8, INT4]
    assert known["layers.0.attn.qkv"] == []
    wide = possible(model, (parse_scheme("int4-g128"),), (), {})
    assert not any(wide.values())


def test_usual_schemes() -> None:
    names = [scheme.name for scheme in usual_schemes("fp32", "cpu")]
    assert names == ["int8", "int4-g128", "int4-g64", "int4-g32"]


def argv(folder: Path, out: Path, *more: str) -> list[str]:
    quick = ["--sequences", "4", "--window", "40", "--method", "rtn", "--device", "cpu"]
    where = ["--out", str(out), "--batch-sizes", "none"]
    return ["quantize", str(folder), *where, *quick, *more]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    path = tmp_path_factory.mktemp("text") / "measured.txt"
    path.write_text(TEXT[5000:7000])
    return ["--text", str(path)]


def test_on_the_command_line(
    folder: Path, text: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bound = ["--auto", "--max-kl", "5", "--max-ppl-increase", "0.99", *text]
    more = ["--skip", HURT, "--memory", "4GiB", "--kv", "kv-int8"]
    assert main(argv(folder, tmp_path / "out", *bound, *more)) == 0
    shown = capsys.readouterr().out
    for words in ("int4-g32", "why not smaller", "left as asked", "weights in memory", "in int8"):
        assert words in shown
    again = argv(folder, tmp_path / "two", *bound, "--schemes", "int8,int4-g32", "--json")
    assert main(again) == 0
    document = json.loads(capsys.readouterr().out)
    assert {row["scheme"] for row in document["projections"]} <= {None, "int8", "int4-g32"}
    assert document["weight_bytes_after"] == document["trials"][-1]["weight_bytes"]
    assert document["kv"] is None
    assert document["speed"] == []
    save = ["--scheme", "int4-g32", "--auto-mixed", "--save", str(tmp_path / "records")]
    assert main(argv(folder, tmp_path / "three", *bound[1:], *save)) == 0
    assert "why not smaller" in capsys.readouterr().out
    (record,) = (tmp_path / "records").iterdir()
    assert "int4-g32-mixed-rtn" in record.name


@pytest.mark.parametrize(
    ("kind", "words", "more"),
    [
        (UsageError, "either --scheme --auto", []),
        (UsageError, "either --scheme --auto", ["--auto", "--scheme", "int8"]),
        (UsageError, "--schemes --auto", ["--scheme", "int8", "--schemes", "int8"]),
        (UsageError, "--memory --auto", ["--scheme", "int8", "--memory", "4GiB"]),
        (UsageError, "remove --auto-mixed", ["--auto", "--auto-mixed"]),
        (UsageError, "scheme int3 known", ["--auto", "--schemes", "int8,int3"]),
        (UsageError, "scheme int8,int4-g32 known", ["--scheme", "int8,int4-g32", "--auto-mixed"]),
        (QualityError, "none of the 1 mixtures", ["--scheme", "int8", "--auto-mixed", *NO_ROOM]),
        (UsageError, "not a size 4GiB", ["--auto", "--memory", "lots"]),
        (UsageError, "--batch-sizes 1,16 none", ["--auto", "--batch-sizes", "1,0"]),
        (UsageError, "no projection int4-g128", ["--auto", "--schemes", "int4-g128"]),
        (UsageError, "--kv kv-fp8, kv-int8", ["--auto", "--kv", "fp8"]),
        (UsageError, "names no projection", ["--auto", "--skip", "layers.9.*"]),
    ],
)
def test_what_is_asked_wrong(
    folder: Path,
    text: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    kind: type[RidgelineError],
    words: str,
    more: list[str],
) -> None:
    refused(capsys, kind, words, *argv(folder, tmp_path / "out", *text, *more))
    assert not (tmp_path / "out").exists()


def test_speed_decides_on_the_command_line(
    folder: Path,
    text: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`down` is slower in int8 at 8 rows: it stays, with the two times."""

    def times(config: Any, scheme: Any, sizes: Any, *about: Any, **more: Any) -> list[LayerChoice]:
        assert sizes == (1, 8)
        slow = tuple(ProductTimes(rows, 1.0, 2.0 if rows == 8 else 0.5) for rows in sizes)
        fast = (ProductTimes(1, 1.0, 0.5),)
        return [LayerChoice(64, 96, "int8", slow), LayerChoice(192, 64, "int8", fast)]

    monkeypatch.setattr("ridgeline.ladder.quantizing.quantize_job.measured_choices", times)
    more = ["--scheme", "int8", "--batch-sizes", "1,8", "--max-kl", "5", *text]
    assert main(argv(folder, tmp_path / "out", *more, "--json")) == 0
    document = json.loads(capsys.readouterr().out)
    kept = [f"layers.{index}.mlp.down" for index in range(3)]
    assert document["stays_for_speed"] == document["stays"] == kept
    assert document["speed"][0]["times"][1]["quantized_s"] == 2.0
    assert document["speed"][0]["reason"] == "0.50x at 8 rows"
    more = ["--auto", "--batch-sizes", "1,8", "--max-kl", "5", "--max-ppl-increase", "0.9", *text]
    assert main(argv(folder, tmp_path / "auto", *more, "--schemes", "int8")) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "int8 is slower here, so these stay in fp32: 64 x 96 (0.50x at 8 rows)" in shown
    assert "slower:" in shown


def test_sizes_and_ranges_as_people_write_them() -> None:
    assert [parse_bytes(text) for text in ("4GiB", "1.5 kb", "500MB", "77", "2m", "1 TiB")] == [
        4 * 2**30, 1500, 500_000_000, 77, 2_000_000, 2**40,
    ]  # fmt: skip
    for text in ("", "-1GiB", "4 pears", "GiB", "1e3"):
        with pytest.raises(UsageError, match="is not a size"):
            parse_bytes(text)
    assert ranges([5, 0, 1, 2, 9, 8]) == "0-2, 5, 8-9"
