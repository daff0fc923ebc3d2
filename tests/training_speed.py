"""A training step on a GPU: checked against the plain loop, then timed, beside Liger's where it can
be imported.

    PYTHONPATH=.:tests:../liger python -m training_speed
    make gpu-training PEERS=../liger

First loss and every gradient on small shapes; then the steps of a 1B shape, 8 x 4096 tokens, for
some seconds each: tokens/s, MFU, memory, and where the time goes, by groups of kernels.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from packed import FP32, draw, pack, tiny

from ridgeline.data.loading.packing import PackedBatch
from ridgeline.hardware import detect
from ridgeline.hardware.clocks import ClockSampler
from ridgeline.models import build_model
from ridgeline.models.config import ModelConfig
from ridgeline.models.cost import num_parameters
from ridgeline.models.families import describe_hf
from ridgeline.models.shapes import SHAPES
from ridgeline.profiling.tracing.tracing import traced
from ridgeline.profiling.tracing.training_division import divide_training
from ridgeline.profiling.tracing.training_trace import StepOwners
from ridgeline.training.config import TrainConfig
from ridgeline.training.initial import fill_initial
from ridgeline.training.naive import naive_gradients, naive_loss
from ridgeline.training.stepping.precision import PRECISIONS
from ridgeline.training.stepping.step import Trainer

DEVICE = torch.device("cuda")
PEAK_FLOPS = 989e12  # H200, dense bf16, datasheet
BATCH, LENGTH = 8, 4096


def say(**values: Any) -> None:
    print(json.dumps(values), flush=True)


# ---- Checks


def small_batches(device: torch.device, lengths: list[tuple[int, ...]]) -> list[PackedBatch]:
    batches = [pack(*draw(*each, vocab=997, seed=i)) for i, each in enumerate(lengths)]
    return [batch.to(device) for batch in batches]


CUTS = {  # documents of one length (cuDNN), and of several
    "equal": [(256, 256)],
    "packed": [(300, 17, 195)],
    "micro-batches": [(256, 256), (100, 412)],
}


def check(precision: str, recomputation: str, cut: str) -> bool:
    """Every gradient's error as a share of its norm, and the loss."""
    changes = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 997}
    batches = small_batches(DEVICE, CUTS[cut])
    model = tiny("cuda", **changes)
    dtype = PRECISIONS[precision].dtype  # type: ignore[index]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(dtype))
    expected = naive_gradients(model, batches)
    loss = naive_loss(model, batches).item()
    config: Any = replace(FP32, precision=precision, recomputation=recomputation)
    got_loss, _, got = Trainer(model, config).gradients(batches)
    assert got.keys() == expected.keys()
    errors = {
        name: ((got[name] - each).norm() / each.norm()).item() for name, each in expected.items()
    }
    worst = max(errors, key=errors.__getitem__)
    limit = {torch.float32: 1e-4, torch.float16: 0.006, torch.bfloat16: 0.04}[dtype]
    if "fp8" in precision:
        limit = 0.45  # random weights carry errors on; a product alone is held tighter on a CPU
    good = errors[worst] < limit and abs(got_loss - loss) < limit * abs(loss) / 4
    say(
        check=f"{precision}, {recomputation}, {cut}",
        good=good,
        loss=(round(got_loss, 5), round(loss, 5)),
        worst=worst,
        error=round(errors[worst], 6),
    )
    return good


def checks(precisions: list[str]) -> bool:
    good = [check(precision, "none", cut) for precision in precisions for cut in CUTS]
    kinds = ("elementwise", "attention", "blocks")
    return all([*good, *(check("bf16", kind, "packed") for kind in kinds)])


# ---- Times


def batches_of(config: ModelConfig, micro: int, seed: int = 0) -> list[PackedBatch]:
    """Random documents of LENGTH tokens, `micro` of them at once."""
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for _ in range(BATCH // micro):
        ids = torch.randint(0, config.vocab_size, (micro, LENGTH), generator=generator)
        targets = ids.roll(-1, 1)
        targets[:, -1] = -100
        batches.append(
            PackedBatch.of(
                ids.flatten(),
                targets.flatten(),
                torch.arange(LENGTH).repeat(micro),
                torch.arange(0, micro * LENGTH + 1, LENGTH, dtype=torch.int32),
            ).to(DEVICE)
        )
    return batches


def flops_of_step(config: ModelConfig) -> float:
    """Six a weight and token, and attention's causal half."""
    per_token = 6 * num_parameters(config) + 6 * config.num_layers * config.q_size * LENGTH
    return float(BATCH * LENGTH * per_token)


def timed(name: str, step: Callable[[], Any], flops: float, seconds: float) -> float:
    """Tokens/s over about so many seconds, after three steps."""
    host = []
    for _ in range(3):
        start = time.perf_counter()
        step()
        host.append(time.perf_counter() - start)
        torch.cuda.synchronize()
    ends: list[torch.cuda.Event] = []
    with ClockSampler(detect("cuda")) as clocks:
        start = time.perf_counter()
        while time.perf_counter() - start < seconds or len(ends) < 3:
            step()
            ends.append(torch.cuda.Event())
            ends[-1].record()
            if len(ends) > 1:
                ends[-2].synchronize()  # as a loop that reads the step before
        torch.cuda.synchronize()
        elapsed = (time.perf_counter() - start) / len(ends)
    say(
        step=name,
        tokens_per_s=round(BATCH * LENGTH / elapsed),
        ms=round(1000 * elapsed, 1),
        mfu=round(100 * flops / elapsed / PEAK_FLOPS, 1),
        host_ms=round(1000 * min(host), 1),
        peak_gib=round(torch.cuda.max_memory_allocated() / 2**30, 2),
        reserved_gib=round(torch.cuda.max_memory_reserved() / 2**30, 2),
        steps=len(ends),
        clocks=str(clocks.median),
    )
    return BATCH * LENGTH / elapsed


def divide(name: str, step: Callable[[], Any], config: ModelConfig, micro: int) -> None:
    """A step's time by parts and ops, as `ridgeline profile --train` divides it; and the longest
    kernels.
    """
    num_steps = 3
    started = time.perf_counter()
    for _ in range(num_steps):
        step()
    torch.cuda.synchronize()
    step_s = (time.perf_counter() - started) / num_steps
    document = traced(step, num_steps, DEVICE, shapes=True)
    division = divide_training(document, StepOwners(config, micro * LENGTH), step_s, DEVICE)
    parts = {part: round(1e3 * seconds, 2) for part, seconds in division.parts.items()}
    say(division=name, ms=parts, notes=division.notes)
    for op in division.ops:
        print(f"  {1e3 * op.seconds:8.2f} ms {op.num_calls:6.0f} x  {op.name}")
        for kernel in op.kernels[:3]:
            print(f"      {1e3 * kernel.seconds:8.2f} ms {kernel.count:6.0f} x  {kernel.name[:90]}")


def ours(config: ModelConfig, settings: TrainConfig, micro: int) -> Callable[[], Any]:
    model = fill_initial(build_model(config, torch.float32, "cuda"), seed=0)
    trainer = Trainer(model, settings)
    batches = batches_of(config, micro)
    return lambda: trainer.step(batches, lr=1e-4)


def repeat(config: ModelConfig, settings: TrainConfig, num_steps: int) -> None:
    """What two runs of one command differ by: nothing with `deterministic`, else their noise. Each
    step has other tokens: of those that are learned by heart the loss is all noise.
    """
    runs, weights = [], []
    for _ in range(2):
        model = fill_initial(build_model(config, torch.float32, "cuda"), seed=0)
        trainer = Trainer(model, settings)
        results = [
            trainer.step(batches_of(config, BATCH, seed), lr=1e-4) for seed in range(num_steps)
        ]
        runs.append([result.loss for result in results])
        weights.append([parameter.detach().cpu() for parameter in model.parameters()])
        del model, trainer, results
        gc.collect()
        torch.cuda.empty_cache()
    apart = [abs(one - other) / one for one, other in zip(*runs, strict=True)]
    equal = all(torch.equal(one, other) for one, other in zip(*weights, strict=True))
    say(
        repeated=f"{num_steps} steps, deterministic {settings.deterministic}",
        loss=runs[0][-1],
        largest_difference=max(apart),
        last_difference=apart[-1],
        same_weights=equal,
        good=equal or not settings.deterministic,
    )


def liger(config: ModelConfig) -> Callable[[], Any]:
    """transformers with Liger's kernels and torch's fused AdamW, all in bf16."""
    from liger_kernel.transformers import apply_liger_kernel_to_llama
    from transformers import LlamaConfig, LlamaForCausalLM

    apply_liger_kernel_to_llama()
    shape = SHAPES["llama-3.2-1b"]
    names = (
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "intermediate_size",
        "vocab_size",
    )
    peer_config = LlamaConfig(
        **{name: shape[name] for name in names},
        rope_theta=500_000.0,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )
    peer_config._attn_implementation = "sdpa"
    with torch.device("cuda"):
        model = LlamaForCausalLM(peer_config).to(torch.bfloat16).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    ids = torch.randint(0, config.vocab_size, (BATCH, LENGTH), device="cuda")

    def step() -> None:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def measure(
    name: str,
    make: Callable[[], Callable[[], Any]],
    flops: float,
    seconds: float,
    divided: ModelConfig | None,
) -> None:
    """One setting; one that fails is named, and the rest goes on. `divided`: of this model, in one
    pass.
    """
    torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    try:
        step = make()
        timed(name, step, flops, seconds)
        if divided is not None:
            divide(name, step, divided, BATCH)
    except Exception as error:
        say(step=name, error=f"{type(error).__name__}: {str(error)[:400]}")
    step = None  # type: ignore[assignment]
    gc.collect()
    torch.cuda.empty_cache()
    say(step=name, seconds=round(time.perf_counter() - began, 1))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=15.0, help="of the main setting")
    parser.add_argument("--no-checks", action="store_true")
    parser.add_argument("--only", default="", help="settings whose names have this")
    options = parser.parse_args()
    began = time.perf_counter()
    say(device=detect("cuda").name, torch=torch.__version__)
    good = options.no_checks or checks(["fp32", "bf16", "fp16", "fp8", "fp8-row"])
    say(checks_s=round(time.perf_counter() - began, 1), good=bool(good))

    config = describe_hf(SHAPES["llama-3.2-1b"], origin="llama-3.2-1b").config
    flops = flops_of_step(config)
    bf16 = TrainConfig(precision="bf16")
    elementwise = replace(bf16, recomputation="elementwise")
    fixed = replace(elementwise, deterministic=True)
    fp8 = replace(bf16, precision="fp8")
    fp8_bf16 = replace(fp8, fp8_weight_gradients="bf16", recomputation="elementwise")
    settings: list[tuple[str, Callable[[], Callable[[], Any]], float, bool]] = [
        ("bf16, elementwise, micro 8", lambda: ours(config, elementwise, 8), options.seconds, True),
        ("Liger, pure bf16", lambda: liger(config), options.seconds * 2 / 3, True),
        ("bf16, none, micro 8", lambda: ours(config, bf16, 8), 4.0, False),
        ("bf16, none, micro 4", lambda: ours(config, bf16, 4), 4.0, False),
        ("bf16, elementwise, micro 4", lambda: ours(config, elementwise, 4), 4.0, False),
        ("bf16, elementwise, deterministic", lambda: ours(config, fixed, 8), 4.0, False),
        ("fp8 by tensor", lambda: ours(config, fp8, 8), 6.0, True),
        ("fp8 by tensor, dW in bf16", lambda: ours(config, fp8_bf16, 8), 4.0, False),
    ]
    for name, make, seconds, divided in settings:
        if options.only in name:
            measure(name, make, flops, seconds, config if divided else None)
    for each in (elementwise, fixed):
        if options.only in "repeated":
            repeat(config, each, num_steps=20)
    say(seconds=round(time.perf_counter() - began, 1))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
