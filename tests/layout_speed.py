"""What layouts cost on two ranks of a CPU beside what they must cost by count, and how long the
proof of a 1B shape takes. Times by the clock need two quiet cores.

    PYTHONPATH=.:tests python -m layout_speed                         # under five minutes
    PYTHONPATH=.:tests python -m layout_speed tensor=2 --steps 20     # one of them
    PYTHONPATH=.:tests python -m layout_speed --only-proof

By count: the time of the same sequences on one device, divided by the ranks (two of them run side
by side, unconnected, so that they share the memory as ranks do, in turns with the layout's steps),
over the share of a pipeline in which nothing waits; and each collective of a step, as it was
recorded, timed alone over the same two ranks. The same in CPU seconds, for a machine that is busy:
they know no waiting, and so no bubble either.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from packed import TINY
from process_ranks import run_ranks
from rank_work import proven, sequences, whole_model
from torch import distributed

from ridgeline.hardware.freed_memory import keep_freed_memory
from ridgeline.kernels import host_library
from ridgeline.models import ModelConfig, build_model
from ridgeline.models.families import describe_hf
from ridgeline.models.shapes import describe_shape
from ridgeline.parallel.bubbles import bubble_share
from ridgeline.parallel.layout import Layout
from ridgeline.parallel.mesh import Mesh
from ridgeline.parallel.recording import Collective, CollectiveRecorder
from ridgeline.training.config import BatchOptions, TrainConfig
from ridgeline.training.initial import fill_initial
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


class Spent(NamedTuple):
    wall_s: float
    cpu_s: float  # of all threads of this process, gloo's too


def spent(run: Callable[[], Any]) -> Spent:
    began, worked = time.perf_counter(), time.process_time()
    run()
    return Spent(time.perf_counter() - began, time.process_time() - worked)


def medians(times: Sequence[Spent]) -> Spent:
    return Spent(*(statistics.median(each) for each in zip(*times, strict=True)))


def steps_in_turns(mesh: Mesh, config: ModelConfig, num_steps: int) -> tuple[Spent, Spent]:
    """Of this rank, and of one device with all sequences while the other ranks do the same: both in
    one process, one step after the other, so that what slows one down slows the other.
    """
    as_the_command()
    own, plain = _trainer(mesh, config, SEQUENCES), _plain_trainer(config)
    times: tuple[list[Spent], list[Spent]] = ([], [])
    for _ in range(num_steps + 2):
        for (trainer, parts), kept in zip((own, plain), times, strict=True):
            distributed.barrier()
            kept.append(spent(partial(trainer.step, parts, lr=1e-3)))
    return medians(times[0][2:]), medians(times[1][2:])


def _plain_trainer(config: ModelConfig) -> tuple[Trainer, list[Any]]:
    model = fill_initial(build_model(config, torch.float32, "cpu"), seed=0)
    return Trainer(model, order_of(Layout())), sequences(SEQUENCES, config.vocab_size, LENGTH)


def _trainer(mesh: Mesh, config: ModelConfig, count: int) -> tuple[Trainer, list[Any]]:
    order = order_of(mesh.layout, count)
    trainer = rank_trainer(config, order, mesh, whole_tensors(whole_model(config)))
    batch = sequences(count, config.vocab_size, LENGTH)
    return trainer, [batch[i] for i in mesh.layout.sequences(mesh.rank, count)]


def sent(mesh: Mesh, config: ModelConfig, count: int) -> Spent:
    """By all collectives of a step, each kind timed alone."""
    trainer, parts = _trainer(mesh, config, count)
    trainer.step(parts, lr=1e-3)
    with CollectiveRecorder(mesh) as recorder:
        trainer.step(parts, lr=1e-3)
    return in_all(recorder.totals(), mesh)


def handed_on(mesh: Mesh, config: ModelConfig) -> Spent:
    """A pipeline's activations and their gradients, one micro-batch after the other."""
    num_bytes = 4 * LENGTH * config.hidden_size
    each = Collective("send", "pipeline", 2, 2 * SEQUENCES, 2 * SEQUENCES * num_bytes)
    return in_all([each], mesh)


def in_all(collectives: Sequence[Collective], mesh: Mesh) -> Spent:
    times = [(each.count, alone(each, mesh)) for each in collectives]
    return Spent(*(sum(count * one[i] for count, one in times) for i in range(2)))


def alone(each: Collective, mesh: Mesh) -> Spent:
    """One of the mean size."""
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
        return Spent(0.0, 0.0)  # its time is that of the other's send
    times = []
    for _ in range(TIMED):
        distributed.barrier()
        times.append(spent(run))
    return medians(times)


def _handed(tensor: torch.Tensor, rank: int, source: int) -> None:
    if rank == source:
        distributed.send(tensor, 1 - source)
    else:
        distributed.recv(tensor, source)


def measured(words: str, config: ModelConfig, num_steps: int) -> dict[str, float]:
    """By the clock, of the slower rank; and in CPU seconds, the mean of the ranks, which other work
    on the machine stretches little and in which nobody waits.
    """
    layout = Layout.parse(words)
    ranks = run_ranks(layout, steps_in_turns, config, num_steps)
    if layout.pipeline > 1:
        every = run_ranks(layout, handed_on, config)
    else:
        every = run_ranks(layout, sent, config, SEQUENCES)
    bubble = bubble_share(layout, SEQUENCES) if layout.pipeline > 1 else 0.0
    took_s = max(own.wall_s for own, _ in ranks)
    share_s = max(plain.wall_s for _, plain in ranks) / layout.size
    sent_s = max(each.wall_s for each in every)
    counted_s = share_s / (1 - bubble) + sent_s
    took_cpu_s = statistics.mean(own.cpu_s for own, _ in ranks)
    share_cpu_s = statistics.mean(plain.cpu_s for _, plain in ranks) / layout.size
    sent_cpu_s = statistics.mean(each.cpu_s for each in every)
    return {
        "share_ms": 1e3 * share_s, "bubble_share": bubble, "sent_ms": 1e3 * sent_s,
        "counted_ms": 1e3 * counted_s, "measured_ms": 1e3 * took_s,
        "over_counted": took_s / counted_s - 1,
        "share_cpu_ms": 1e3 * share_cpu_s, "sent_cpu_ms": 1e3 * sent_cpu_s,
        "measured_cpu_ms": 1e3 * took_cpu_s,
        "over_counted_cpu": took_cpu_s / (share_cpu_s + sent_cpu_s) - 1,
    }  # fmt: skip


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
