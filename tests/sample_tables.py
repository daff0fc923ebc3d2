"""Documents of every verb that prints a table, with plausible figures that nobody measured and
names as long as real ones.
"""

from __future__ import annotations

from typing import Any

from ridgeline.profiling.document import PARTS

DEVICE = "NVIDIA H200 141GB HBM3e"
MODEL = "meta-llama/Llama-3.1-8B-Instruct"


def interval(value: float) -> dict[str, float]:
    return {"value": value, "low": value * 0.93, "high": value * 1.07}


def op(name: str, share: float, bytes_moved: float, flops: float, verdict: str) -> dict[str, Any]:
    seconds = share * 3.2e-3
    return {
        "op": name,
        "calls": 32.0,
        "seconds": seconds,
        "share": share,
        "bytes": bytes_moved,
        "flops": flops,
        "bytes_per_s": bytes_moved / seconds,
        "flops_per_s": flops / seconds,
        "achieved_bytes_per_s": bytes_moved / seconds,
        "achieved_flops_per_s": flops / seconds,
        "bound": "memory",
        "share_of_ceiling": 0.873,
        "verdict": verdict,
        "occupancy": None,
        "dram": None,
        "tensor": None,
    }


def profile() -> dict[str, Any]:
    rows = [
        op("layers.*.mlp.gate_up + activation", 0.412, 7.5e9, 1.5e10, "memory"),
        op("layers.*.attention.projected_attention", 0.218, 3.1e9, 9e9, "memory"),
        op("layers.*.mlp.down + residual + norm", 0.204, 3.7e9, 7.5e9, "memory"),
        op("head + sampling", 0.101, 1.05e9, 2.1e9, "overhead"),
        op("embed", 0.003, 1e5, 0.0, "overhead"),
    ]
    step = {
        "label": "decode, 8 sequences of 4,096 tokens",
        "step_s": 3.2e-3,
        "tokens_per_s": 2500.0,
        "share_of_limit": 0.78,
        "limit_s": 2.5e-3,
        "bound": "memory",
        "ceiling_source": "measured",
        "rows": rows,
        "totals": dict.fromkeys(PARTS, 4e-4),
        "num_kernels": 163.0,
        "sentence": "decode is limited by memory bandwidth at 78% of what this GPU reaches",
    }
    return {
        "model": MODEL,
        "device": DEVICE,
        "loop": "engine",
        "form": "bf16, weights in int4-g128, KV cache in fp8",
        "steps": [step, step | {"label": "prefill, 4 prompts of 2,048 tokens"}],
        "gap": [
            {"phase": "decode", "name": "gaps", "step_s": 0.0004, "least_s": 0.0, "share": 0.11},
        ],
        "next": [
            {
                "title": "weights in fp8",
                "flags": "--scheme fp8",
                "speedup": 1.63,
                "low": 1.5,
                "high": 1.72,
                "why": "weights are 81% of the bytes of a decode step",
            },
            {
                "title": "prompt lookup",
                "flags": "--speculation prompt-lookup",
                "speedup": 1.2,
                "low": 0.9,
                "high": 1.9,
                "why": "several tokens for one reading of the weights, if the text repeats itself",
            },
        ],
        "assumed": "Gains are for 8 requests with 2048 tokens in and 128 out.",
        "notes": [],
        "trace": None,
        "html": None,
        "record": None,
    }


def quantize() -> dict[str, Any]:
    projections = [
        {"name": f"layers.{layer}.{kind}", "scheme": scheme, "num_bytes": 58_720_256}
        | {"kl": 0.0001, "why": why}
        for layer in range(32)
        for kind, scheme, why in (
            ("attention.qkv", "int4-g128", ""),
            ("mlp.gate_up", "int4-g64", "int4-g128 is outside the quality bound"),
            ("mlp.down", "fp8" if layer % 3 else None, "slower than bf16 at batch 16 here"),
        )
    ]
    return {
        "model": MODEL,
        "scheme": "int4-g128 and int4-g64 and fp8",
        "dtype": "bf16",
        "out": "/data/checkpoints/llama-3.1-8b-instruct-auto",
        "num_quantized": 160,
        "stays": [f"layers.{layer}.mlp.down" for layer in range(16)],
        "file_bytes_before": 4_661_211_808,
        "file_bytes_after": 5_730_000_000,
        "larger": "in int4-g128 and int4-g64 and fp8 this model is larger than the original: 5.34 "
        "GiB in files, not 4.34 GiB (mostly Q4_0, 4.6 bits per weight); no scheme is smaller",
        "stored_dtype": "bf16",
        "stored_exactly": [f"layers.{layer}.attn_norm.weight" for layer in range(32)],
        "weight_bytes_before": 16_060_522_496,
        "weight_bytes_after": 5_720_000_000,
        "plain_expert_bytes": 0,
        "quality": {
            "original": {"perplexity": interval(8.123), "num_tokens": 7012, "num_windows": 14},
            "perplexity_increase": interval(0.0042),
            "mean_kl": interval(0.00612),
            "p99_kl": 0.0871,
            "changed_share": interval(0.0312),
        },
        "verdict": "within the quality bounds: mean KL is 0.00612 (0.00569 to 0.00655), allowed "
        "is 0.02; perplexity changes by +0.42% (+0.39% to +0.45%), allowed is +2.00%",
        "text": None,
        "calibration": None,
        "fit": {
            "message": "int4-g128 does not fit 90 of 120 projections; int4-g64 fits all 120",
            "unfit": [f"layers.{layer}.mlp.down" for layer in range(12)],
        },
        "plain_for_speed": ["mlp.down stays in bf16 in 16 layers: int4 is slower there"],
        "projections": projections,
        "kv": {"dtype": "fp8", "keys_db": -31.0, "values_db": -30.0},
        "head": "int8",
        "matrices": [
            {"name": f"layers.{layer}.attention.qkv.weight", "error_db": -18.2 - layer}
            for layer in range(8)
        ],
        "original_on": "host",
        "expanded_from_gguf": True,
    }


def evaluation() -> dict[str, Any]:
    subject = {"model": MODEL, "dtype": "bf16", "scheme": "int4-g128", "head": "int8"}
    subject |= {"kv_dtype": "fp8", "plain_for_speed": None}
    text = {"file": "book.txt", "window": 2048, "num_tokens": 262_144, "num_windows": 128}
    text |= {"seconds": 31.4, "perplexity": interval(8.123), "bits_per_byte": interval(0.6123)}
    divergence = {
        "original": {"perplexity": interval(8.09)},
        "perplexity_increase": interval(0.0042),
        "mean_kl": interval(0.00612),
        "p99_kl": 0.0871,
        "max_kl": 1.93,
        "changed_share": interval(0.0312),
    }
    layers = [
        {"name": f"layers.{layer}.mlp.gate_up", "kind": "part", "db": 21.3, "block_db": 24.1}
        for layer in range(16)
    ]
    peer = {"name": "transformers", "version": "4.57.1", "dtype": "bf16", "seconds": 88.1}
    peer |= {"perplexity": interval(8.124), "difference": interval(0.00012)}
    task = {"name": "hellaswag", "metric": "acc_norm"}
    task |= {"num_questions": 10_042, "seconds": 512.0, "score": interval(0.791)}
    task |= {"acc": interval(0.601), "original": {"score": interval(0.793)}}
    task |= {"difference": interval(-0.002)}
    original = subject | {"scheme": None, "head": "plain", "kv_dtype": "bf16"}
    return subject | {
        "device": DEVICE,
        "text": text,
        "peer": peer,
        "against": original | {"divergence": divergence, "layers": layers},
        "task": task,
        "gate": {"passed": False, "problem": "mean KL is 0.03000 (0.02 to 0.04), allowed is 0.02"},
    }


def percentiles(median: float) -> dict[str, float]:
    return {"p50": median, "p90": 2 * median, "p99": 5 * median}


def bench_engine() -> dict[str, Any]:
    return {
        "model": MODEL,
        "device": DEVICE,
        "workload": "throughput",
        "dtype": "bf16",
        "kv_dtype": "fp8",
        "scheme": "int4-g128",
        "head": "int8",
        "plain_for_speed": None,
        "rounds": [18_342.1, 19_001.4, 18_700.9],
        "output_tokens_per_s": 18_700.9,
        "tokens_per_s": 56_301.7,
        "share_of_limit": 0.713,
        "num_requests": 1024,
        "num_prompt_tokens": 1_048_576,
        "num_output_tokens": 262_144,
        "hit_tokens": 131_072,
        "num_preemptions": 12,
        "num_steps": 3412,
        "wall_s": 14.02,
        "mean_batch": 381.2,
        "batch_share": 0.74,
        "mean_page_share": 0.61,
        "peak_page_share": 0.97,
        "drafted_tokens": 412_000,
        "accepted_tokens": 201_000,
        "memory": {"planned_bytes": 120 * 10**9, "used_bytes": 118 * 10**9},
        "peer": "transformers",
        "peers": [{"name": "static batch 64", "output_tokens_per_s": 2104.2, "speedup": 8.89}],
        "first_token": percentiles(0.8123),
        "per_output_token": percentiles(0.0213),
        "request": percentiles(6.1),
        "gap": percentiles(0.00001),
        "start": {"caches": "cold", "first_token_s": 21.3, "ready_s": 19.8},
        "not_finished": [],
    }


def compared() -> dict[str, Any]:
    row = {"dtype": "bf16", "scheme": None, "head": "plain", "speculation": "none"}
    row |= {"median": 118_342.1, "speedup": 1.0, "best": 119_001.4, "best_speedup": 1.0}
    row |= {"per_cpu_s": 8123.4, "cpu_speedup": 1.0, "share_of_limit": 0.71}
    row |= {"plain_for_speed": None, "drafted_tokens": 0, "accepted_tokens": 0}
    codes = {"name": "int4-g128+head", "scheme": "int4-g128", "head": "int8", "speedup": 1.92}
    variants = [row | {"name": "bf16"}, row | codes, row | {"name": "bf16+lookup"}]
    comparison = {"workload": "throughput", "base": "bf16", "variants": variants}
    document = {"model": MODEL, "device": DEVICE, "num_rounds": 7}
    return document | {"what": "compare", "comparisons": [comparison]}


def bench_kernels() -> dict[str, Any]:
    def row(name: str, case: str, bound: str, best: str | None) -> dict[str, Any]:
        found = {"op": name, "case": case, "seconds": 123.4e-6, "spread": 0.01, "share": 0.871}
        found |= {"bytes_per_s": 4.12e12, "flops_per_s": 712e12, "bound": bound}
        found |= {"baselines": {} if best is None else {best: 160.2e-6}, "failed": {}}
        return found | {"best_baseline": best, "speedup": None if best is None else 1.3}

    return {
        "what": "kernels",
        "device": DEVICE,
        "rows": [
            row("deterministic_attention", "batch 64, 32/8 heads, 4096 tokens", "memory", "sdpa"),
            row("quantized_linear", "int4-g128 16x4096x14336", "compute", "torch.compile"),
            row("projected_attention", "1x8192, fp8 pages", "memory", None),
        ],
    }


def bench_serve(num_endpoints: int = 2) -> dict[str, Any]:
    own = {"late_p99_s": 0.0012, "lag_p99_s": 0.0004, "cpu_share": 0.31, "cpu_s_per_event": 8e-5}
    end = {
        "url": "http://inference-gateway.example.internal:8000",
        "model": MODEL,
        "notes": [],
        "rounds": [2104.0, 2201.0],
        "num_answered": 1000,
        "num_requests": 1000,
        "errors": {"timeout": 2},
        "requests_per_s": 16.3,
        "offered_rate": 16.5,
        "output_tokens_per_s": 2150.4,
        "num_prompt_tokens": 1_048_576,
        "num_output_tokens": 262_144,
        "first_token": percentiles(0.2123),
        "per_output_token": percentiles(0.0213),
        "between_events": percentiles(0.0213),
        "request": percentiles(6.1),
        "within": interval(0.912),
        "goodput": 14.9,
        "found": {"rate": 16.3, "is_sure": False, "in_words": "16.3 requests/s met the bounds"},
        "own": own,
        "num_short": 1,
        "details": [],
        "client_note": None,
    }
    ends = [end | {"url": f"{end['url'][:-4]}{8000 + index}"} for index in range(num_endpoints)]
    document = {"what": "serve", "workload": "azure-code", "arrivals": "poisson at 16.5/s"}
    return document | {"bound": {"ttft_ms": 500.0, "tpot_ms": 50.0}, "endpoints": ends}


def accuracy() -> dict[str, Any]:
    row = {"num": 128, "median_error": 0.081, "bias": -0.021, "share_close": 0.87}
    areas = [
        row | {"area": area, "share_held": 0.91, "factor": None if area == "fuse" else 1.31}
        for area in ("fuse", "tensor cores", "custom kernels", "batch and memory", "all")
    ]
    document = {"what": "accuracy", "file": "/root/.cache/ridgeline/predictions.jsonl", "num": 640}
    first = {"num": 24, "num_last": 17, "num_from_earlier": 9, "median_share": 0.97}
    document |= {"num_broken": 0, "default_factor": 1.5, "coverage": 0.9, "areas": areas}
    return document | {"first_answers": first}


def kernels(action: str) -> dict[str, Any]:
    listed = {
        "op": "deterministic_attention",
        "summary": "attention over pages in a fixed order of sums, for prompts and decode",
        "gradients": False,
        "cases": 115,
        "timed": 16,
        "sources": "triton.py cuda.cu cpu.cpp",
        "baselines": [],
    }
    problem = "max error 0.031 is above 0.002 at [0, 17, 3]"
    rows: dict[str, list[dict[str, Any]]] = {
        "list": [listed],
        "check": [
            {"op": "rms_norm", "case": "64x4096 bf16, residual", "problem": None},
            {"op": "paged_attention", "case": "batch 3, 1000 tokens (split)", "problem": problem},
        ],
        "build": [
            {"op": "quantized_linear", "source": "cuda.cu", "took": "31.2 s", "problem": None}
        ],
        "tune": [
            {
                "op": "skinny_linear",
                "key": "bf16 1x4096x28672 gate_up",
                "num_tried": 41,
                "share": 0.913,
                "best": "BLOCK_N=16 BLOCK_K=512 num_warps=4 num_stages=3",
            }
        ],
        "compile": [
            {
                "op": "deterministic_attention",
                "target": "gfx942",
                "kernel": "decode_split_kernel",
                "case": "x",
                "registers": 168,
                "shared_bytes": 65_536,
                "spilled_bytes": 0,
                "problem": None,
            },
            {
                "op": "rms_norm",
                "target": "sm_100",
                "kernel": "rms_norm_kernel",
                "case": "x",
                "problem": "does not compile: LLVM ERROR: cannot select intrinsic",
            },
        ],
    }
    document: dict[str, Any] = {"action": action, "rows": rows[action]}
    return document | ({"failed": 1} if action in ("check", "compile", "build") else {})
