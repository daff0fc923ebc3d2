"""What layouts cost on two ranks of a CPU beside what they must cost by count, and how long the
proof of a 1B shape takes. Needs two quiet cores.

    PYTHONPATH=.:tests python -m layout_speed                         # under five minutes
    PYTHONPATH=.:tests python -m layout_speed tensor=2 --steps 20     # one of them
    PYTHONPATH=.:tests python -m layout_speed --only-proof

By count: the time of the same sequences on one device, divided by the ranks (two of them run side
by side, unconnected, so that they share the memory as ranks do), over the share of a pipeline in
which nothing waits; and each collective of a step, as it was recorded, timed alone over the same
two ranks.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import torch
from packed import TINY
from process_ranks import run_ranks
from rank_work import proven, sequences, whole_model
from torch import distributed

from ridgeline.hardware.freed_memory import keep_freed_memory
from ridgeline.kernels import host_library
from ridgeline.models import ModelConfig
from ridgeline.models.families import describe_hf
from ridgeline.models.shapes import describe_shape
from ridgeline.parallel.bubbles import bubble_share
from ridgeline.parallel.layout import Layout
from ridgeline.parallel.mesh import Mesh
from ridgeline.parallel.recording import Collective, CollectiveRecorder
from ridgeline.training.config import BatchOptions, TrainConfig
from ridgeline.training.ranks.proving import Proof
from ridgeline.training.ranks.rank_trainer import rank_trainer, whole_tensors
from ridgeline.training.stepping.step import Trainer

SHAPE = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 8192,
}
SEQUENCES, LENGTH = 8, 256
LAYOUTS = ("shard=2", "tensor=2", "pipeline=2")
TIMED = 20  # of each collective


def order_of(layout: Layout, count: int = SEQUENCES) -> TrainConfig:
    return TrainConfig(
        batch=BatchOptions(sequences=count, micro=1), precision="fp32", layout=layout
    )


def as_the_command() -> None:
    """What `ridgeline train` does on a CPU before anything runs."""
    keep_freed_memory()
    host_library.prepare()


def step_seconds(mesh: Mesh, config: ModelConfig, count: int, num_steps: int) -> list[float]:
    """Of each step over `count` sequences in all."""
    as_the_command()
    trainer, parts = _trainer(mesh, config, count)
    seconds = []
    for _ in range(num_steps + 2):
        began = time.perf_counter()
        trainer.step(parts, lr=1e-3)
        seconds.append(time.perf_counter() - began)
    return seconds[2:]


def _trainer(mesh: Mesh, config: ModelConfig, count: int) -> tuple[Any, list[Any]]:
    order = order_of(mesh.layout, count)
    trainer = rank_trainer(config, order, mesh, whole_tensors(whole_model(config)))
    batch = sequences(count, config.vocab_size, LENGTH)
    return trainer, [batch[i] for i in mesh.layout.sequences(mesh.rank, count)]


def sent(mesh: Mesh, config: ModelConfig, count: int) -> list[tuple[Collective, float]]:
    """Each collective of a step, and the seconds of all of its kind, timed alone."""
    trainer, parts = _trainer(mesh, config, count)
    trainer.step(parts, lr=1e-3)
    with CollectiveRecorder(mesh) as recorder:
        trainer.step(parts, lr=1e-3)
    return [(each, each.count * alone(each, mesh)) for each in recorder.totals()]


def handed_on(mesh: Mesh, config: ModelConfig) -> list[tuple[str, float]]:
    """A pipeline's activations and their gradients, one micro-batch after the other."""
    num_bytes = 4 * LENGTH * config.hidden_size
    each = Collective("send", "pipeline", 2, 2 * SEQUENCES, 2 * SEQUENCES * num_bytes)
    return [(each.kind, each.count * alone(each, mesh))]


def alone(each: Collective, mesh: Mesh) -> float:
    """The median seconds of one of the mean size."""
    size = max(2, each.num_bytes // each.count // 4 // 2 * 2)
    whole, half = torch.zeros(size), torch.zeros(size // 2)
    run = {
        "all-reduce": lambda: distributed.all_reduce(whole),
        "all-gather": lambda: distributed.all_gather_into_tensor(whole, half),
        "reduce-scatter": lambda: distributed.reduce_scatter_tensor(half, whole),
        "broadcast": lambda: distributed.broadcast(whole, 0),
        "send": lambda: _handed(whole, mesh.rank, 0),
        "receive": lambda: _handed(whole, mesh.rank, 1),
    }[each.kind]
    if each.kind == "receive":
        return 0.0  # its time is that of the other's send
    seconds = []
    for _ in range(TIMED):
        distributed.barrier()
        began = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def _handed(tensor: torch.Tensor, rank: int, source: int) -> None:
    if rank == source:
        distributed.send(tensor, 1 - source)
    else:
        distributed.recv(tensor, source)


def counted_seconds(layout: Layout, plain_s: float, sent_s: float) -> float:
    """`plain_s`: all sequences on one device while another does the same."""
    share = 1 - bubble_share(layout, SEQUENCES) if layout.pipeline > 1 else 1.0
    return plain_s / layout.size / share + sent_s


def measured(words: str, config: ModelConfig, num_steps: int) -> dict[str, float]:
    layout = Layout.parse(words)
    beside = run_ranks(Layout(replicate=2), unconnected, config, num_steps)
    plain_s = max(statistics.median(each) for each in beside)
    ranks = run_ranks(layout, step_seconds, config, SEQUENCES, num_steps)
    took_s = max(statistics.median(each) for each in ranks)
    if layout.pipeline > 1:
        every = run_ranks(layout, handed_on, config)
    else:
        every = run_ranks(layout, sent, config, SEQUENCES)
    sent_s = max(sum(seconds for _, seconds in each) for each in every)
    expected_s = counted_seconds(layout, plain_s, sent_s)
    bubble = bubble_share(layout, SEQUENCES) if layout.pipeline > 1 else 0.0
    return {
        "plain_ms": 1e3 * plain_s, "share_ms": 1e3 * plain_s / layout.size,
        "bubble_share": bubble, "sent_ms": 1e3 * sent_s, "counted_ms": 1e3 * expected_s,
        "measured_ms": 1e3 * took_s, "over_counted": took_s / expected_s - 1,
    }  # fmt: skip


def unconnected(mesh: Mesh, config: ModelConfig, num_steps: int) -> list[float]:
    """As one device, while the other rank does the same."""
    as_the_command()
    from ridgeline.models import build_model
    from ridgeline.training.initial import fill_initial

    trainer = Trainer(
        fill_initial(build_model(config, torch.float32, "cpu"), seed=0), order_of(Layout())
    )
    parts = sequences(SEQUENCES, config.vocab_size, LENGTH)
    distributed.barrier()
    seconds = []
    for _ in range(num_steps + 2):
        began = time.perf_counter()
        trainer.step(parts, lr=1e-3)
        seconds.append(time.perf_counter() - began)
    return seconds[2:]


def proof_seconds(mesh: Mesh, model: ModelConfig) -> tuple[Proof, float]:
    """With the seconds of its core, which other work does not stretch as much."""
    as_the_command()
    began = time.process_time()
    return proven(mesh, model), time.process_time() - began


def show(result: dict[str, Any]) -> None:
    print(json.dumps({k: round(v, 3) if isinstance(v, float) else v for k, v in result.items()}),
          flush=True)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("layouts", nargs="*", default=list(LAYOUTS))
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--only-proof", action="store_true", help="of the 1B shape")
    options = parser.parse_args()
    began = time.perf_counter()
    config = describe_hf(TINY | SHAPE, origin="small").config
    for words in () if options.only_proof else options.layouts:
        show({"layout": words} | measured(words, config, options.steps))
    model = describe_shape("llama-3.2-1b").config
    for words in ("shard=2", "tensor=2"):
        ranks = run_ranks(Layout.parse(words), proof_seconds, model)
        proof = ranks[0][0]
        cpu_s = max(seconds for _, seconds in ranks)
        show({"proof": words, "layers": proof.num_layers, "seconds": proof.seconds, "cpu_s": cpu_s})
    show({"all_took_s": time.perf_counter() - began})


if __name__ == "__main__":
    main()
