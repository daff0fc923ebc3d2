"""Steps of an 8B shape on one GPU, all weights and adapters, with what the memory plan chooses; and
of the 1B shape under the machinery of layouts, over a world of one, beside the plain trainer.

    PYTHONPATH=.:tests python -m training_speed_large            # make gpu-training-large
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import distributed
from training_speed import BATCH, LENGTH, batches_of, flops_of_step, measure, ours, say

from ridgeline.hardware.detection import available_memory
from ridgeline.models import build_model
from ridgeline.models.config import ModelConfig
from ridgeline.models.cost import num_parameters
from ridgeline.models.shapes import describe_shape
from ridgeline.parallel.layout import Layout
from ridgeline.parallel.mesh import join_mesh, leave_mesh
from ridgeline.training.config import BatchOptions, DataOptions, Precision, TrainConfig
from ridgeline.training.initial import fill_initial
from ridgeline.training.memory.methods import TrainingMethod, adapter_size
from ridgeline.training.memory.plan import plan_training
from ridgeline.training.methods.adapters import add_adapters
from ridgeline.training.methods.options import LoraOptions
from ridgeline.training.ranks.rank_trainer import rank_trainer, whole_tensors
from ridgeline.training.ranks.weights import local_model
from ridgeline.training.stepping.step import Trainer

DEVICE = "cuda:0"
RANK = 16


def planned(config: ModelConfig, settings: TrainConfig, method: TrainingMethod) -> TrainConfig:
    """As `ridgeline train` fills in what is open."""
    torch.cuda.empty_cache()
    plan = plan_training(config, settings, DEVICE, available_memory(DEVICE), method)
    chosen = plan.config
    say(
        micro=chosen.batch.micro,
        recomputation=chosen.recomputation,
        planned_gib=round(plan.reserved_bytes / 2**30, 2),
    )
    return chosen


def settings_of(precision: Precision) -> TrainConfig:
    return TrainConfig(
        precision=precision,
        batch=BatchOptions(sequences=BATCH),
        data=DataOptions(sequence_length=LENGTH),
    )


def full(config: ModelConfig, precision: Precision) -> Callable[[], Any]:
    chosen = planned(config, settings_of(precision), TrainingMethod())
    assert chosen.batch.micro is not None
    return ours(config, chosen, chosen.batch.micro)


def adapters(shape: str, precision: Precision) -> Callable[[], Any]:
    """Over a base of random weights in bf16, whose products are in fp8 with precision fp8."""
    description = describe_shape(shape)
    order = replace(settings_of(precision), lora=LoraOptions(rank=RANK))
    method = TrainingMethod(adapter_size(description, order.lora))
    chosen = planned(description.config, order, method)
    assert chosen.batch.micro is not None
    model = fill_initial(build_model(description.config, torch.bfloat16, DEVICE), seed=0)
    learned = add_adapters(model, description, order.lora, seed=0)
    trainer = Trainer(model, chosen, learned)
    batches = batches_of(description.config, chosen.batch.micro)
    return lambda: trainer.step(batches, lr=1e-4)


def world_of_one(config: ModelConfig, micro: int, folder: Path) -> Callable[[], Any]:
    """`fully_shard` and the sums of ranks, with one rank: no layout does so, for what is not cut by
    `shard` is not gathered.
    """
    from torch.distributed.device_mesh import init_device_mesh

    order = replace(settings_of("bf16"), recomputation="elementwise")
    order = replace(order, batch=BatchOptions(sequences=BATCH, micro=micro))
    store = distributed.FileStore(str(folder / "store"), 1)
    mesh = join_mesh(Layout(), store, 0, 1, torch.device(DEVICE))
    mesh.weights = init_device_mesh("cuda", (1,), mesh_dim_names=("shard",))
    model = fill_initial(build_model(config, torch.float32, DEVICE), seed=0)
    local_model.needs_sharding = lambda mesh: True  # type: ignore[assignment]
    trainer = rank_trainer(config, order, mesh, whole_tensors(model))
    del model
    batches = batches_of(config, micro)
    return lambda: trainer.step(batches, lr=1e-4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=12.0)
    parser.add_argument("--only", default="", help="settings whose names have this")
    parser.add_argument("--small", action="store_true", help="small shapes, to try it")
    options = parser.parse_args()
    large, small = ("tiny", "tiny") if options.small else ("llama-3.1-8b", "llama-3.2-1b")
    big, model = describe_shape(large).config, describe_shape(small).config
    per_token = num_parameters(big) - big.vocab_size * big.hidden_size
    attention = big.num_layers * big.q_size * LENGTH
    full_flops = BATCH * LENGTH * (6.0 * per_token + 6 * attention)
    frozen_flops = BATCH * LENGTH * (4.0 * per_token + 6 * attention)
    elementwise = TrainConfig(precision="bf16", recomputation="elementwise")
    with TemporaryDirectory() as folder:
        settings: list[tuple[str, Callable[[], Callable[[], Any]], float]] = [
            ("one device", lambda: ours(model, elementwise, 4), flops_of_step(model)),
            ("world of one", lambda: world_of_one(model, 4, Path(folder)), flops_of_step(model)),
            ("one device again", lambda: ours(model, elementwise, 4), flops_of_step(model)),
            ("8B, all weights, bf16", lambda: full(big, "bf16"), full_flops),
            ("8B, adapters, bf16", lambda: adapters(large, "bf16"), frozen_flops),
            ("8B, adapters, fp8", lambda: adapters(large, "fp8"), frozen_flops),
        ]
        for name, make, flops in settings:
            if options.only in name:
                measure(name, make, flops, options.seconds, None)
        leave_mesh()


if __name__ == "__main__":
    main()
