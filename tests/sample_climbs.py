"""Climbs to draw, with plausible figures that nobody measured: a small model on a CPU and a shape
of 8B on an H200. Marked as sample data in their notes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ridgeline.ladder.outcome import (
    CurvePoint,
    Figures,
    NextStep,
    Quality,
    ReportedMemory,
    RoofPoint,
    RungOutcome,
    RungStatus,
    Side,
    Speedup,
)
from ridgeline.ladder.reporting.result import Climb
from ridgeline.profiling.predicting.prediction import Area, GapPart, Prediction

SAMPLE = "Sample data, made up to draw with: nothing in this report was measured."
GB = 10**9


def predicted(speedup: float, low: float, high: float, why: str) -> Prediction:
    return Prediction(speedup, low, high, why)


def achieved(value: float, low: float, high: float, before: float) -> Speedup:
    spread = (0.99, 1.01, 1.0, 0.995, 1.004)
    rounds = tuple(before * each for each in spread)
    return Speedup(value, low, high, rounds, tuple(value * each for each in rounds))


def quality(kl: float, ppl: float, problem: str | None = None) -> Quality:
    return Quality(kl, kl * 0.9, kl * 1.12, ppl, ppl - 0.002, ppl + 0.003, 16384, problem)


def rung(
    name: str, area: Area, title: str, status: RungStatus, reason: str, **more: Any
) -> RungOutcome:
    edit = more.pop("edit", {})
    return RungOutcome(name, area, title, edit, status, reason, **more)


def curve(speed: float, best: float, wait: float) -> tuple[CurvePoint, ...]:
    """Throughput that levels off at `best`."""
    found = []
    for power in range(9):
        batch = 2**power
        tokens = 1 / (1 / (speed * batch) + 1 / best)
        found.append(CurvePoint(batch, tokens, batch / tokens * (1 + wait)))
    return tuple(found)


def h200() -> Climb:
    rungs = (
        rung(
            "engine", "fuse", "fused kernels in the engine", "kept",
            "2.4 times as fast, and greedy output is the same",
            edit={"loop": "engine", "kernels": "fused"},
            predicted=predicted(2.1, 1.6, 2.8, "1,270 launches a step become 261"),
            achieved=achieved(2.41, 2.38, 2.44, 27.3), seconds=38.0,
        ),
        rung(
            "bf16", "tensor cores", "weights and matrices in bf16", "kept",
            "1.9 times as fast, inside the quality bound", edit={"dtype": "bf16"},
            predicted=predicted(1.96, 1.7, 2.2, "16.1 instead of 32.1 GB of weights a step"),
            achieved=achieved(1.91, 1.90, 1.92, 65.8), quality=quality(0.0004, 0.0005),
            seconds=41.0,
        ),
        rung(
            "graphs", "overhead", "captured graphs and overlapped steps", "kept",
            "the device no longer waits for launches", edit={"graphs": True, "overlap": True},
            predicted=predicted(1.35, 1.1, 1.6, "1.9 of 7.9 ms a step were launch gaps"),
            achieved=achieved(1.42, 1.41, 1.43, 125.7), seconds=29.0,
        ),
        rung(
            "fp8", "quantize", "weights in fp8", "kept",
            "1.6 times as fast; mean KL is 0.0061 of 0.02 allowed", edit={"scheme": "fp8"},
            predicted=predicted(1.72, 1.5, 1.9, "8.1 instead of 16.1 GB of weights a step"),
            achieved=achieved(1.63, 1.61, 1.65, 178.5), quality=quality(0.0061, 0.0042),
            seconds=74.0,
        ),
        rung(
            "int4", "quantize", "weights in int4, groups of 128", "dropped",
            "faster, and outside the bound: mean KL is 0.04130, allowed is 0.02",
            edit={"scheme": "int4-g128"},
            predicted=predicted(1.35, 1.1, 1.6, "4.6 instead of 8.1 GB of weights a step"),
            achieved=achieved(1.31, 1.29, 1.33, 291.0),
            quality=quality(0.0413, 0.0391, "mean KL is 0.04130, allowed is 0.02"), seconds=121.0,
        ),
        rung(
            "kv-fp8", "quantize", "keys and values in fp8", "dropped",
            "not faster beyond noise at this context: 1.01 (0.99 to 1.02)",
            edit={"kv.dtype": "fp8"},
            predicted=predicted(1.02, 0.95, 1.1, "0.13 instead of 0.27 GB of KV a step"),
            achieved=achieved(1.01, 0.99, 1.02, 291.0), quality=quality(0.0068, 0.0047),
            seconds=33.0,
        ),
        rung(
            "tuned", "custom kernels", "kernels tuned for this GPU", "kept",
            "small, and beyond noise", edit={"tuned": True},
            predicted=predicted(1.05, 1.0, 1.12, "projections reach 81% of bandwidth untuned"),
            achieved=achieved(1.07, 1.06, 1.08, 291.0), seconds=66.0,
        ),
        rung(
            "lookup", "batch and memory", "speculation by lookup in the text", "failed",
            "its process ended with signal 9 (killed) after 12 s",
            edit={"speculation.method": "prompt-lookup"},
            predicted=predicted(1.2, 0.9, 1.9, "30% of drafts are right on such texts"),
            seconds=12.0,
        ),
        rung(
            "draft", "batch and memory", "speculation with a draft model", "not applicable",
            "no smaller model of this vocabulary was given; name one with --draft",
        ),
        rung(
            "prefix", "batch and memory", "prefix cache", "not reached",
            "the 8 minutes given were spent", edit={"kv.prefix_cache": True},
            predicted=predicted(1.0, 0.95, 1.1, "prompts of this workload begin differently"),
        ),
    )  # fmt: skip
    before = Side(
        {"dtype": "fp32", "scheme": None, "kernels": "reference", "graphs": False,
         "kv": {"dtype": "fp32", "page_size": 64}},
        "naive", Figures(27.3, 0.412, 0.0366, 5.1, 0.29, 32_121_044_992),
        curve(27.3, 1900.0, 0.02),
        (RoofPoint("decode, before", 0.5, 4.38e11, 0.21, "memory"),
         RoofPoint("prefill, before", 210.0, 3.9e13, 0.71, "compute")),
        (ReportedMemory("weights", 32_121_044_992, "as they run"),
         ReportedMemory("keys and values", 16 * GB, "one contiguous cache a request"),
         ReportedMemory("activations", 4_100_000_000, "of the largest step")),
    )  # fmt: skip
    after = Side(
        {"dtype": "bf16", "scheme": "fp8", "kernels": "fused", "graphs": True, "overlap": True,
         "kv": {"dtype": "bf16", "page_size": 64}},
        "engine", Figures(311.4, 0.0192, 0.00321, 0.43, 0.78, 8_610_000_000),
        curve(311.4, 26500.0, 0.0),
        (RoofPoint("decode, after", 2.1, 5.4e12, 0.78, "memory"),
         RoofPoint("prefill, after", 2950.0, 9.6e14, 0.74, "compute")),
        (ReportedMemory("weights", 8_610_000_000, "fp8 codes and scales, embeddings in bf16"),
         ReportedMemory("keys and values", 104 * GB, "26,400 pages of 64 tokens"),
         ReportedMemory("activations", 1_900_000_000, "of the largest step"),
         ReportedMemory("graphs", 2_300_000_000, "captured at 14 batch sizes"),
         ReportedMemory("workspace", 700_000_000, "of the kernels")),
    )  # fmt: skip
    return Climb(
        "meta-llama/Llama-3.1-8B-Instruct", "latency",
        "batch-1: 1 request at a time, 512 in, 128 out",
        ("ridgeline", "optimize", "meta-llama/Llama-3.1-8B-Instruct", "--for", "latency",
         "--budget", "8m", "--out", "llama-fast"),
        "2026-11-15T19:02:11+00:00", 471.0,
        {"vendor": "nvidia", "device_type": "cuda", "name": "NVIDIA H200", "architecture": "sm_90",
         "memory_bytes": 150_754_820_096, "num_units": 132, "driver": "580.95.05",
         "num_threads": None},
        {"ridgeline": "0.1.0", "python": "3.12.3", "torch": "2.11.0+cu130", "triton": "3.6.0",
         "cuda": "13.0", "platform": "Linux 6.8.0 x86_64"},
        4.21e12, "measured",
        {"fp32": 5.2e13, "bf16": 7.4e14, "fp16": 7.5e14, "fp8": 1.42e15},
        {"max_kl": 0.02, "max_ppl_increase": 0.02},
        before, after, rungs,
        Speedup(11.4, 11.2, 11.6, (27.1, 27.4, 27.3), (310.0, 311.0, 312.0)),
        (SAMPLE,), ("ridgeline", "serve", "llama-fast"),
        gap=(
            GapPart("decode", "matrices", 0.0022, 0.0018, 0.12),
            GapPart("decode", "gaps", 0.00021, 0.0, 0.06),
            GapPart("prefill", "matrices", 0.012, 0.009, 0.021),
            GapPart("decode", "other kernels", 0.00004, 0.0, 0.012),
            GapPart("decode", "host", 0.00002, 0.0, 0.007),
        ),
        next_steps=(
            NextStep("4 requests at once instead of 1 (tokens/s of all)", "",
                     predicted(3.4, 2.8, 4.1, "matrices: 91% of a decode step")),
        ),
    )  # fmt: skip


def answer_first() -> Climb:
    """As `optimize` climbs: from the engine's defaults, with the ladder that explains it."""
    climb = h200()
    kept = [each for each in climb.rungs if each.status == "kept"]
    guess = rung(
        "first-guess", "quantize", "weights in fp8 + twice as many requests at once", "kept",
        "1.42x (1.40 to 1.44); predicted to be fastest together",
        edit={"scheme": "fp8", "limits.max_batch": 512},
        predicted=predicted(1.5, 1.3, 1.7, "8.1 instead of 16.1 GB of weights a step"),
        achieved=achieved(1.42, 1.40, 1.44, 219.0), quality=quality(0.0061, 0.0042), seconds=52.0,
    )  # fmt: skip
    others = [each for each in climb.rungs if each.status != "kept"]
    reasons = ("a CPU has no graphs", "nothing is left to undo", "it is as the defaults have it")
    others += [
        rung(f"other-{number}", "overhead", f"change {number}", "not applicable", reason)
        for number, reason in enumerate(reasons)
    ]
    return replace(
        climb,
        rungs=(guess, *others),
        ladder=tuple(replace(each, achieved=None) if each.name == "tuned" else each
                     for each in kept),
        before=replace(climb.after, figures=Figures(219.0, 0.027, 0.0046, 0.61, 0.55, 16 * GB),
                       roof=climb.before.roof, curve=curve(219.0, 18500.0, 0.0)),
        total=Speedup(1.42, 1.40, 1.44, (219.0,) * 5, (311.0,) * 5),
        time_ledger={"load": 81.0, "compile": 40.2, "rounds": 190.5, "look": 31.0},
    )  # fmt: skip


def cpu() -> Climb:
    rungs = (
        rung(
            "engine", "fuse", "fused kernels in the engine", "kept",
            "1.5 times as fast, and greedy output is the same",
            edit={"loop": "engine", "kernels": "fused"},
            predicted=predicted(1.3, 1.0, 1.7, "host time of 4.1 of 21 ms a step"),
            achieved=achieved(1.48, 1.42, 1.55, 24.1), seconds=17.0,
        ),
        rung(
            "bf16", "tensor cores", "weights and matrices in bf16", "dropped",
            "slower: 0.71 (0.68 to 0.74); this CPU has no bf16 units", edit={"dtype": "bf16"},
            predicted=predicted(1.1, 0.8, 1.9, "269 instead of 538 MB of weights a step"),
            achieved=achieved(0.71, 0.68, 0.74, 35.7), quality=quality(0.0007, 0.0004),
            seconds=31.0,
        ),
        rung(
            "graphs", "overhead", "captured graphs", "not applicable",
            "a CPU has no graphs to capture",
        ),
        rung(
            "int8", "quantize", "weights in int8", "kept",
            "2.1 times as fast; mean KL is 0.0018 of 0.02 allowed", edit={"scheme": "int8"},
            predicted=predicted(2.4, 1.8, 3.1, "140 instead of 538 MB of weights a step"),
            achieved=achieved(2.12, 2.03, 2.2, 35.7), quality=quality(0.0018, 0.0011), seconds=52.0,
        ),
    )  # fmt: skip
    before = Side(
        {"dtype": "fp32", "scheme": None}, "naive",
        Figures(24.1, 0.61, 0.0415, 3.2, 0.34, 538_060_032), curve(24.1, 90.0, 0.0)[:5],
        (RoofPoint("decode, before", 0.5, 6.4e9, 0.31, "memory"),
         RoofPoint("prefill, before", 60.0, 5.6e10, 0.55, "compute")),
        (ReportedMemory("weights", 538_060_032, "as they run"),
         ReportedMemory("keys and values", 94_371_840, "one contiguous cache")),
    )  # fmt: skip
    after = Side(
        {"dtype": "fp32", "scheme": "int8"}, "engine",
        Figures(75.6, 0.22, 0.0132, 1.06, 0.61, 163_000_000), curve(75.6, 210.0, 0.0)[:5],
        (RoofPoint("decode, after", 1.6, 2.0e10, 0.61, "memory"),
         RoofPoint("prefill, after", 190.0, 7.4e10, 0.73, "compute")),
        (ReportedMemory("weights", 163_000_000, "int8 codes and scales"),
         ReportedMemory("keys and values", 402_653_184, "pages of 64 tokens"),
         ReportedMemory("activations", 21_000_000, "of the largest step")),
    )  # fmt: skip
    return Climb(
        "demo", "latency", "cpu: 4 requests, 64 in, 48 out",
        ("ridgeline", "optimize", "demo", "--budget", "5m", "--out", "demo-fast"),
        "2026-11-15T18:40:00+00:00", 212.0,
        {"vendor": "intel", "device_type": "cpu", "name": "Intel Xeon Platinum 8488C",
         "architecture": "x86_64 avx512 amx", "memory_bytes": 16 * 2**30, "num_units": 2,
         "driver": "6.8.0", "num_threads": 2},
        {"ridgeline": "0.1.0", "python": "3.12.3", "torch": "2.13.0+cpu"},
        2.05e10, "measured", {"fp32": 1.02e11, "bf16": 9.4e10},
        {"max_kl": 0.02, "max_ppl_increase": 0.02},
        before, after, rungs,
        Speedup(3.14, 3.02, 3.25, (24.0, 24.2, 24.1, 23.9, 24.3), (75.0, 75.6, 76.1, 75.2, 75.9)),
        (SAMPLE,), ("ridgeline", "serve", "demo-fast"),
    )  # fmt: skip


def crowded() -> Climb:
    """All that makes labels meet: long names, many changes, points and rates that are nearly the
    same, gains from a hundredth to a thousand, curves of many batches.
    """
    climb = answer_first()
    word = "activations quantized per token and weights in int4 with groups of 128"
    gains = (1.003, 1.01, 0.4, 1.02, 40.0, 1.5, 1.001, 25.0)
    rungs = [
        rung(
            f"many-{number}", "custom kernels", f"{word}, attempt {number}",
            "kept" if gain > 1 else "dropped", f"{word}; " * 3, edit={f"field-{number}": word},
            predicted=predicted(gain * 1.1, gain / 3, gain * 3, word),
            achieved=achieved(gain, gain * 0.99, gain * 1.01, 10.0),
            quality=quality(0.02 * gain, 0.001 * gain), seconds=10.0,
        )
        for number, gain in enumerate(gains * 3)
    ]  # fmt: skip
    close = [
        RoofPoint(f"{phase}, {side}", 2.0 * near, 5.0e12 * near, 0.9, "memory")
        for side in ("before", "after")
        for phase, near in (("decode", 1.0), ("prefill", 1.02))
    ]
    batches = tuple(range(1, 65))
    flat = tuple(CurvePoint(batch, 300.0 + 0.01 * batch, 0.0031) for batch in batches)
    rates = {"fp32": 7.1e14, "tf32": 7.12e14, "bf16": 7.35e14, "fp16": 7.38e14, "fp8": 7.7e14,
             "int8": 7.9e14, "e4m3 per token, rowwise scaled accumulation": 8.4e14}  # fmt: skip
    return replace(
        climb,
        rungs=tuple(rungs),
        ladder=tuple(rungs),
        matrix_rates=rates,
        before=replace(climb.before, roof=tuple(close[:2]), curve=flat),
        after=replace(climb.after, roof=tuple(close[2:]), curve=flat),
        gap=tuple(replace(part, name=f"{part.name} of {word}") for part in climb.gap),
        model="an-organization-with-a-long-name/" + "model-" * 20,
        total=Speedup(1180.0, 900.0, 1500.0, (1.0,) * 5, (1180.0,) * 5),
    )


def empty() -> Climb:
    """Nothing was run, nothing is known."""
    side = Side({}, "naive", Figures(24.1, None, None, None, None, 0))
    return replace(
        cpu(), rungs=(), before=side, after=side, total=None, bandwidth=None, matrix_rates={},
        bandwidth_source=None, bounds={}, serve_command=(), hardware={}, versions={},
    )  # fmt: skip
