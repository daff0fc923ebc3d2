"""`ridgeline profile --train`: a step's parts add up, what was predicted stands beside them, flags
of the other kind of profile are refused; and traces of a GPU, made by hand, are divided by kernels.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import make_folder, refused
from train_runs import Capture, single_thread

from ridgeline.cli import main
from ridgeline.cli.training import profile as profile_training
from ridgeline.errors import UsageError
from ridgeline.hardware import Ceiling, Hardware, detect
from ridgeline.models.shapes import describe_shape
from ridgeline.profiling import training_profile
from ridgeline.profiling.document import TRAINING_PARTS
from ridgeline.profiling.predicting.training_next import TrainingSituation, next_settings
from ridgeline.profiling.predicting.training_work import planned_step, training_work
from ridgeline.profiling.tracing.trace import STEP
from ridgeline.profiling.tracing.training_division import divide_training
from ridgeline.profiling.tracing.training_trace import OPTIMIZER, TRAINING_TIMES, StepOwners
from ridgeline.profiling.training_profile import gap_parts
from ridgeline.training.config import BatchOptions, DataOptions, TrainConfig

RATES = {"read_bandwidth": 2e11, "matrix_fp32": 4e11, "matrix_bf16": 4e11}
SMALL = ("--device", "cpu", "--batch", "2", "--sequence-length", "32", "--steps", "2")
TINY = ("profile", "--train", "--shape", "tiny", *SMALL)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    with single_thread():
        yield


def with_rates(hardware: Hardware, only: Any = None, progress: Any = None) -> Hardware:
    known = {key: Ceiling(value, "B/s", "measured") for key, value in RATES.items()}
    return replace(hardware, ceilings=known)


@pytest.fixture(autouse=True)
def known_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ceilings are not measured in these tests, and are above what this machine does; nor are those
    used that another test has left in the cache.
    """
    monkeypatch.setattr(profile_training, "measure", with_rates)
    monkeypatch.setattr(profile_training, "load_cached", lambda hardware: hardware)


def profiled(capsys: Capture, *argv: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main([*argv, "--json"]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def rows_of(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["op"]: row for row in document["steps"][0]["rows"]}


def test_parts_add_up_beside_what_was_predicted(tmp_path: Path, capsys: Capture) -> None:
    page, trace = tmp_path / "page.html", tmp_path / "trace.json"
    more = ("--html", str(page), "--trace", str(trace), "--save", str(tmp_path / "records"))
    document = profiled(capsys, *TINY, "--precision", "fp32", *more)
    (step,) = document["steps"]
    assert set(step["totals"]) == set(TRAINING_TIMES) == set(TRAINING_PARTS)
    assert sum(step["totals"].values()) == pytest.approx(step["step_s"])
    rows = sum(row["seconds"] for row in step["rows"])
    assert rows + step["totals"]["copies"] + step["totals"]["host"] == pytest.approx(step["step_s"])
    assert step["communication"] is None
    assert step["totals"].pop("communication") == 0
    assert all(each > 0 for each in step["totals"].values())
    assert sum(step["predicted_totals"].values()) == pytest.approx(step["predicted_s"])
    assert step["tokens_per_s"] == pytest.approx(2 * 32 / step["step_s"])
    assert 0 < step["share_of_limit"] < 1
    assert 0 < step["mfu_measured"] < 1
    assert sum(part["share"] for part in document["gap"]) == pytest.approx(
        1 - step["share_of_limit"]
    )
    html = page.read_text()
    for words in ("Training", "mlp.gate_up backward", "predicted", "Under the roofline",
                  "Why it is not 100%", "optimizer"):  # fmt: skip
        assert words.lower() in html.lower(), words
    assert "://" not in html.replace("http://www.w3.org", "").replace("http%3A", "")
    events = json.loads(trace.read_text())["traceEvents"]
    assert OPTIMIZER in {event.get("name") for event in events}
    record = json.loads(Path(document["record"]).read_text())
    assert record["values"]["training_step"]["value"] == step["step_s"]
    assert record["values"]["predicted_step"]["value"] == step["predicted_s"]


def test_the_gap_and_the_limit_are_the_step() -> None:
    seconds = {"products": 4.0, "attention": 1.0, "host": 5.0}
    parts = gap_parts(seconds, 10.0, {"products": 1.0, "attention": 1.0})
    assert [(part.name, part.share) for part in parts] == [("host", 0.5), ("products", 0.3)]
    assert sum(part.share for part in parts) == pytest.approx(1 - 2 / 10)
    assert gap_parts(seconds, 10.0, {"products": 1.0, "attention": 3.0}) == parts
    assert gap_parts(seconds, 10.0, None) == []


LEVELS = {
    "none": set(),
    "elementwise": set(),
    "attention": {"attention again", "attn.qkv again", "attn.out again"},
    "blocks": {
        *("attention again", "attn.qkv again", "attn.out again"),
        *("mlp.gate_up again", "mlp.down again"),
    },
}


@pytest.mark.sweep(keep=2)
@pytest.mark.parametrize("level", LEVELS)
def test_every_op_is_known_and_what_is_computed_again_is_told(
    level: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Whatever pays at all: of a step of `tiny` it is 2%, more or less with the machine's load.
    paying = partial(next_settings, least=1.0)
    monkeypatch.setattr(training_profile, "next_settings", paying)
    document = profiled(capsys, *TINY, "--precision", "fp32", "--recomputation", level)
    rows = rows_of(document)
    again = {name for name in rows if name.endswith(" again") and rows[name]["part"] == "products"}
    assert again == {name for name in LEVELS[level] if name != "attention again"}
    assert ("attention again" in rows) == ("attention again" in LEVELS[level])
    config = TrainConfig(
        precision="fp32",
        recomputation=level,  # type: ignore[arg-type]
        batch=BatchOptions(2, 2),
        data=DataOptions(sequence_length=32),
    )
    step = planned_step(describe_shape("tiny").config, config, "cpu", [32, 32])
    assert rows.keys() <= {op.name for op in training_work(step)}
    products = [row for row in rows.values() if row["part"] == "products"]
    flops = sum(op.flops for op in training_work(step) if op.part == "products")
    assert sum(row["flops"] for row in products) == pytest.approx(flops)
    assert all(row["predicted_s"] > 0 for row in rows.values())
    flags = [each["flags"] for each in document["next"]]
    less = {"attention": "--recomputation elementwise", "blocks": "--recomputation attention"}
    assert level not in less or less[level] in flags


def test_other_ways_of_training(tmp_path: Path, capsys: Capture) -> None:
    folder = make_folder(tmp_path / "model", hidden_size=64, intermediate_size=96, head_dim=16)
    model = ("profile", "--train", str(folder), *SMALL)
    adapters = rows_of(profiled(capsys, *model, "--lora", "4", "--precision", "bf16"))
    assert "adapters" in " ".join(adapters)
    assert adapters["optimizer"]["bytes"] < 1e6
    parts = profiled(capsys, *TINY, "--precision", "bf16", "--micro-batch", "1")["steps"][0]
    assert parts["totals"]["copies"] > 0
    assert parts["label"] == "2 x 32 tokens"


def test_people_see_tables(capsys: Capture) -> None:
    assert main([*TINY, "--precision", "fp32", "--recomputation", "blocks"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    for words in ("2 x 32 tokens: ", "head backward", "measured over predicted", "in all",
                  "MFU", "What next", "--recomputation attention", "training step",
                  "The largest parts of the rest are"):  # fmt: skip
        assert words in out, words


def test_flags_of_the_other_kind_are_refused(capsys: Capture) -> None:
    refused(capsys, UsageError, "--context means nothing --train", *TINY, "--context", "64")
    refused(capsys, UsageError, "--prefill means nothing", *TINY, "--prefill", "64")
    refused(capsys, UsageError, "--counters means nothing", *TINY, "--counters")
    refused(capsys, UsageError, "--loop means nothing", *TINY, "--loop", "naive")
    refused(capsys, UsageError, "--dtype is for inference --precision", *TINY, "--dtype", "bf16")
    refused(capsys, UsageError, "--scheme is for inference", *TINY, "--scheme", "int8")
    refused(capsys, UsageError, "--precision is for training steps add --train", "profile",
            "--shape", "tiny", "--device", "cpu", "--precision", "bf16")  # fmt: skip
    refused(capsys, UsageError, "--lora goes with a model", *TINY, "--lora", "4")
    refused(capsys, UsageError, "--batch is 0", *TINY, "--batch", "0")
    refused(capsys, UsageError, "micro_batch is 3", *TINY, "--micro-batch", "3")
    refused(capsys, UsageError, "give either a model", "profile", "--train")


# ---- A GPU's trace, made by hand: microseconds, the host's two threads, kernels behind them


def host(name: str, begin: float, end: float, thread: int = 1, dims: Any = None) -> dict[str, Any]:
    cat = "user_annotation" if name.startswith("ridgeline") else "cpu_op"
    args = {"Input Dims": dims} if dims is not None else {}
    return {"ph": "X", "cat": cat, "name": name, "ts": begin, "dur": end - begin, "tid": thread,
            "args": args}  # fmt: skip


def kernel(number: int, name: str, launch: float, begin: float, end: float, thread: int = 1,
           cat: str = "kernel") -> list[dict[str, Any]]:  # fmt: skip
    args = {"correlation": number}
    return [
        {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": launch, "dur": 1,
         "tid": thread, "args": args},
        {"ph": "X", "cat": cat, "name": name, "ts": begin, "dur": end - begin, "tid": 9,
         "args": args},
    ]  # fmt: skip


def gpu_step(at: float) -> list[dict[str, Any]]:
    """Of 1,000 µs, with gaps of 50 in front."""
    number = int(at)
    qkv = [[64, 128], [128, 256]]
    back = "autograd::engine::evaluate_function: NormLinearBackward"
    return [
        host(STEP, at, at + 500),
        host("NormLinear", at + 1, at + 30),
        host("aten::mm", at + 10, at + 20, dims=qkv),
        host("aten::scaled_dot_product_attention", at + 40, at + 60),
        host("LinearCrossEntropy", at + 70, at + 99),
        host("aten::mm", at + 71, at + 80, dims=[[64, 128], [128, 10240]]),
        host(back, at + 100, at + 200, thread=2),
        host("NormLinearBackward", at + 101, at + 199, thread=2),
        host("aten::mm", at + 110, at + 120, thread=2, dims=[[256, 64], [64, 128]]),
        host(OPTIMIZER, at + 300, at + 400),
        *kernel(number + 1, "_rms_norm_kernel", at + 5, at + 550, at + 600),
        *kernel(number + 2, "nvjet_hsh_256x128", at + 15, at + 600, at + 700),
        *kernel(number + 3, "cudnn_generated_fort_native_sdpa", at + 50, at + 700, at + 800),
        *kernel(number + 4, "nvjet_hsh_256x128", at + 75, at + 800, at + 850),
        *kernel(number + 5, "_row_losses", at + 90, at + 850, at + 900),
        *kernel(number + 6, "nvjet_hsh_256x128", at + 115, at + 900, at + 1100, thread=2),
        *kernel(number + 7, "_rms_norm_backward_kernel", at + 150, at + 1100, at + 1150, thread=2),
        *kernel(number + 8, "Memcpy DtoD", at + 160, at + 1150, at + 1200, cat="gpu_memcpy"),
        *kernel(number + 9, "_adamw_kernel", at + 350, at + 1200, at + 1500),
    ]


def test_kernels_go_to_the_op_that_launched_them() -> None:
    document = {"traceEvents": [*gpu_step(0.0), *gpu_step(1000.0)]}
    owners = StepOwners(describe_shape("tiny").config, num_tokens=64)
    division = divide_training(document, owners, 1e-3, torch.device("cuda"))
    parts = {name: round(1e6 * seconds) for name, seconds in division.parts.items()}
    assert parts == {"products": 350, "attention": 100, "loss": 50, "element-wise": 100,
                     "optimizer": 300, "communication": 0, "copies": 50,
                     "host": 50}  # fmt: skip
    ops = {op.name: round(1e6 * op.seconds) for op in division.ops}
    assert ops == {"attn.qkv": 100, "attn.qkv backward": 200, "head": 50, "attention": 100,
                   "loss": 50, "norms": 50, "norms backward": 50, "optimizer": 300}  # fmt: skip
    assert division.total_s == pytest.approx(1e-3)


def test_what_ranks_tell_each_other_counts_where_nothing_else_runs() -> None:
    """A gather begins in the gap before the step's first kernel and runs on beside the next two; a
    sum lies between two kernels' copies and the optimizer, which it covers half of.
    """

    def step(at: float) -> list[dict[str, Any]]:
        gather = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
        scatter = "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(ncclDevKernelArgsStorage)"
        more = [
            *kernel(int(at) + 20, gather, at + 3, at + 520, at + 720),
            *kernel(int(at) + 21, scatter, at + 155, at + 1400, at + 1510),
        ]
        return [*gpu_step(at), *more]

    document = {"traceEvents": [*step(0.0), *step(1000.0)]}
    owners = StepOwners(describe_shape("tiny").config, num_tokens=64)
    division = divide_training(document, owners, 1e-3, torch.device("cuda"))
    ops = {op.name: round(1e6 * op.seconds) for op in division.ops}
    assert (ops["all gather"], ops["reduce scatter"]) == (30, 10)
    assert round(1e6 * division.parts["communication"]) == 40
    assert round(1e6 * division.parts["products"]) == 350
    assert round(1e6 * division.parts["host"]) == 10


def on_ranks(*argv: str) -> dict[str, Any]:
    """By a command of its own, which starts them."""
    command = [sys.executable, "-P", "-m", "ridgeline", *argv, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def check_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str) -> dict[str, Any]:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    page = tmp_path / "page.html"
    more = ("--micro-batch", "1", "--precision", "fp32", "--layout", layout)
    document = on_ranks(*TINY, *more, "--html", str(page), "--save", str(tmp_path / "records"))
    (step,) = document["steps"]
    assert document["layout"] == layout
    assert sum(step["totals"].values()) == pytest.approx(step["step_s"], rel=1e-3)
    assert step["totals"]["communication"] > 0
    waits = step["communication"]
    assert 0 < waits["exposed_s"] < waits["measured_step_s"]
    record = json.loads(Path(document["record"]).read_text())
    for each in waits["collectives"]:
        name = f"{each['kind']}_over_{each['over']}".replace("-", "_")
        assert record["values"][f"{name}_bytes"]["value"] == each["num_bytes"]
        known = f"{name}_exposed" in record["values"]
        assert known == (each["exposed_s"] is not None)
    assert "ranks wait for each other" in page.read_text().lower()
    assert not list(tmp_path.glob("ridgeline-profile-*"))  # logs that nobody needs
    return document


@pytest.mark.slow
def test_ranks_are_profiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    document = check_ranks(tmp_path, monkeypatch, "shard=2")
    rows = {row["op"]: row for row in document["steps"][0]["rows"]}
    for name in ("all-gather over shard", "reduce-scatter over shard"):
        assert rows[name]["part"] == "communication"
        assert rows[name]["seconds"] > 0
    kinds = {(each["kind"], each["over"]): each for each in document["steps"][0]["communication"]
             ["collectives"]}  # fmt: skip
    layers = describe_shape("tiny").config.num_layers
    assert kinds["all-gather", "shard"]["count"] == 2 * layers + 1
    assert kinds["reduce-scatter", "shard"]["count"] == layers + 1


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["pipeline=2", "tensor=2", "context=2", "replicate=2"])
def test_every_axis_is_profiled(
    layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_ranks(tmp_path, monkeypatch, layout)


def test_layouts_of_a_profile_that_are_refused(capsys: Capture) -> None:
    """Before anything is started."""
    refused(capsys, UsageError, "--layout is for training steps; add --train", "profile",
            "--shape", "tiny", "--device", "cpu", "--layout", "shard=2")  # fmt: skip
    refused(capsys, UsageError, "cannot be shared by the 3 ranks", *TINY, "--layout", "shard=3")
    refused(capsys, UsageError, "--devices is 3", *TINY, "--layout", "shard=2", "--devices", "3")
    refused(capsys, UsageError, "did you mean shard", *TINY, "--layout", "shrad=2")


def test_gains_of_the_steps_that_were_timed_on_an_h200() -> None:
    """bf16 to fp8 gave 1.237, keeping what elementwise makes again 1.013 (too little to advise)."""
    rates = {"read_bandwidth": 4.381e12, "matrix_bf16": 8.011e14, "matrix_fp8": 1.4647e15}
    known = {key: Ceiling(value, "", "measured") for key, value in rates.items()}
    hardware = replace(detect("cpu"), device_type="cuda", ceilings=known)
    config = TrainConfig(
        precision="bf16",
        recomputation="none",
        batch=BatchOptions(8, 8),
        data=DataOptions(sequence_length=4096),
    )
    model = describe_shape("llama-3.2-1b").config
    situation = TrainingSituation(model, config, "cuda:0", hardware, [4096] * 8, 140 << 30)
    (fp8,) = next_settings(situation)
    assert fp8.flags == "--precision fp8"
    assert fp8.prediction.speedup == pytest.approx(498.8 / 403.4, rel=0.03)
    assert "products" in fp8.prediction.why
    blocks = replace(situation, config=replace(config, recomputation="blocks"))
    assert "--recomputation attention" in [each.flags for each in next_settings(blocks)]
    attention = replace(situation, config=replace(config, recomputation="attention"))
    assert "--recomputation elementwise" in [each.flags for each in next_settings(attention)]
    assert next_settings(replace(blocks, free_bytes=20 << 30)) == []  # none of them fits
