"""Fine-tuning on a CPU, beside transformers' plain loop: the same weights, tokens, threads, steps
in turn.

    PYTHONPATH=.:tests python -m training_speed_cpu --save results
    PYTHONPATH=.:tests python -m training_speed_cpu --steps 1 --profile ours

transformers runs its model in fp32 with its own loss, `clip_grad_norm_` and torch's fused AdamW.
Both losses of every step are printed: they must be the same to three digits.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from ridgeline.data.loading.packing import IGNORED, PackedBatch
from ridgeline.engine.loading.saved import tokenizer_of
from ridgeline.hardware import detect
from ridgeline.kernels import host_library
from ridgeline.models.checkpoint import open_checkpoint, resolve_model
from ridgeline.models.families import describe
from ridgeline.quantization import load_model, save_model
from ridgeline.records import slug
from ridgeline.training.config import OptimizerOptions, TrainConfig, with_auto
from ridgeline.training.stepping.step import Trainer

LR, MAX_NORM, BETAS, EPS = 1e-5, 1.0, (0.9, 0.95), 1e-8
# A step: returns its loss.
Step = Callable[[], float]


def token_ids(model: Path, text: Path, count: int) -> torch.Tensor:
    tokenizer = tokenizer_of(model)
    assert tokenizer is not None
    words = text.read_text(encoding="utf-8")[: 16 * count]
    return torch.tensor(tokenizer.encode(words)[:count])


def our_step(model: Path, ids_T: torch.Tensor, precision: str) -> Step:
    options = OptimizerOptions(
        lr=LR, beta1=BETAS[0], beta2=BETAS[1], eps=EPS, weight_decay=0.0, max_norm=MAX_NORM
    )
    config = with_auto(
        TrainConfig(precision=precision, optimizer=options),  # type: ignore[arg-type]
        "cpu",
    )
    trainer = Trainer(load_model(model, dtype="fp32", device="cpu"), config)
    targets_T = torch.cat((ids_T[1:], torch.tensor([IGNORED])))
    starts = torch.tensor([0, len(ids_T)], dtype=torch.int32)
    batch = PackedBatch.of(ids_T, targets_T, torch.arange(len(ids_T)), starts)
    return lambda: trainer.step([batch], LR).loss


def peer_step(model: Path, ids_T: torch.Tensor) -> Step:
    from transformers import AutoModelForCausalLM

    source = describe(open_checkpoint(model))
    with tempfile.TemporaryDirectory() as folder:
        save_model(load_model(model, dtype="fp32", device="cpu"), folder, source=source)
        peer = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(
        peer.parameters(), lr=LR, betas=BETAS, eps=EPS, weight_decay=0.0, fused=True
    )
    ids = ids_T.unsqueeze(0)

    def step() -> float:
        loss = peer(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(peer.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.item())

    return step


def timed(step: Step) -> tuple[float, float]:
    start = time.perf_counter()
    loss = step()
    return time.perf_counter() - start, loss


def show_profile(step: Step) -> None:
    step()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        step()
    averages = profiler.key_averages(group_by_input_shape=True)
    print(averages.table(sort_by="self_cpu_time_total", row_limit=40, max_name_column_width=40))
    print(profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=25))


def measure(steps: dict[str, Step], num_steps: int, num_tokens: int) -> dict[str, list[float]]:
    """Seconds of every step but each one's first, in turn."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(num_steps + 1):
        for name, step in steps.items():
            elapsed, loss = timed(step)
            rate = num_tokens / elapsed
            print(f"{name:>14} step {number}: loss {loss:.4f}, {rate:6.1f} tok/s", flush=True)
            if number:
                seconds[name].append(elapsed)
    return seconds


def summary(seconds: dict[str, list[float]], num_tokens: int) -> dict[str, object]:
    import transformers

    rates = {name: num_tokens / statistics.median(each) for name, each in seconds.items()}
    peer = rates["transformers"]
    return {
        "what": f"fine-tuning demo, one sequence of {num_tokens} tokens a step",
        "command": " ".join(["python -m training_speed_cpu", *sys.argv[1:]]),
        "device": detect("cpu").name,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "date": datetime.now(UTC).date().isoformat(),
        "tokens_per_s": {name: round(rate, 1) for name, rate in rates.items()},
        "times_transformers": {name: round(rate / peer, 3) for name, rate in rates.items()},
        "seconds_of_steps": {name: [round(s, 3) for s in each] for name, each in seconds.items()},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--text", type=Path, default=Path("README.md"))
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--profile", choices=("ours", "transformers"))
    parser.add_argument("--save", type=Path, help="folder for the result")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    host_library.prepare()  # as `ridgeline train` does
    model = resolve_model(options.model)
    ids_T = token_ids(model, options.text, options.tokens)
    makers: dict[str, Callable[[], Step]] = {
        "ours": lambda: our_step(model, ids_T, options.precision),
        "transformers": lambda: peer_step(model, ids_T),
    }
    if options.profile:
        show_profile(makers[options.profile]())
        return 0
    seconds = measure({n: make() for n, make in makers.items()}, options.steps, len(ids_T))
    result = summary(seconds, len(ids_T))
    text = json.dumps(result, indent=2)
    print(text)
    if options.save:
        device = slug(str(result["device"]))
        (options.save / f"training-demo-cpu-{device}-{result['date']}.json").write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
