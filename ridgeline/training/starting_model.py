"""The model that a run begins with: a checkpoint, or random weights of a shape; and its teacher.

source = model_source(config)
trainer = source.trainer(config, device, checkpoint=None, progress=None)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ridgeline.data import Tokenizer
from ridgeline.engine.loading.saved import tokenizer_of
from ridgeline.errors import UnsupportedError, UsageError
from ridgeline.formats.dtypes import dtype_name
from ridgeline.hardware.allocator import grow_blocks
from ridgeline.models import Transformer, build_model
from ridgeline.models.checkpoint import open_checkpoint, resolve_model
from ridgeline.models.config import ModelConfig
from ridgeline.models.families import Description, describe, describe_hf
from ridgeline.models.shapes import describe_shape, shape_values
from ridgeline.parallel.mesh import Mesh
from ridgeline.progress import Progress
from ridgeline.quantization import load_model
from ridgeline.quantization.files.fuse import kept_schemes
from ridgeline.quantization.linear import keep_copies
from ridgeline.quantization.load import runnable
from ridgeline.quantization.scheme import Scheme
from ridgeline.training.config import (
    TrainConfig,
)
from ridgeline.training.initial import fill_initial
from ridgeline.training.memory.methods import TrainingMethod, adapter_size
from ridgeline.training.methods.adapters import add_adapters
from ridgeline.training.methods.rounded import found_roundings
from ridgeline.training.ranks.adapters import adapter_trainer, sharded_base
from ridgeline.training.ranks.rank_trainer import RankTrainer, rank_trainer
from ridgeline.training.ranks.weights.sources import initial_weights, stored_tensors
from ridgeline.training.saving.adapter_files import AdapterExporter, read_adapter
from ridgeline.training.saving.checkpoint import (
    Exporter,
)
from ridgeline.training.stepping.precision import PRECISIONS
from ridgeline.training.stepping.step import Trainer

VOCAB_MULTIPLE = 64  # a shape's vocabulary is the tokenizer's, rounded up: products run faster


@dataclass(frozen=True)
class TeacherModel:
    """The model whose probabilities are learned."""

    path: Path
    config: ModelConfig

    def load(self, dtype: str, device: str, progress: Progress | None) -> Transformer:
        """Frozen."""
        model = load_model(
            self.path, dtype=dtype, device=device, keep_codes=False, progress=progress
        )
        return model.requires_grad_(False)


@dataclass(frozen=True)
class StartingModel:
    """Where weights come from: a checkpoint, or nowhere."""

    description: Description
    tokenizer: Tokenizer | None  # None: for a shape that is only measured
    path: Path | None
    teacher: TeacherModel | None = None

    def method(self, config: TrainConfig, device: str) -> TrainingMethod:
        """What the memory plan has to know of how the model is trained."""
        teacher = None if self.teacher is None else self.teacher.config
        if config.lora.rank is None:
            return TrainingMethod(teacher=teacher)
        assert self.path is not None, "check_complete"
        stored = kept_schemes(open_checkpoint(self.path), self.description)
        codes, _ = runnable(stored, PRECISIONS[config.precision].dtype, device)
        if codes and config.layout.shard > 1:
            num_ranks = config.layout.size
            raise UsageError(
                f"{config.model} has weights as codes ({stored_names(codes)}), which shard does "
                f"not cut; use --layout replicate={num_ranks}, where each rank has all of them"
            )
        return TrainingMethod(adapter_size(self.description, config.lora), codes, teacher)

    def load(self, device: str, seed: int, progress: Progress | None) -> Transformer:
        """In fp32, whatever is computed in later."""
        if self.path is not None:
            return load_model(self.path, dtype="fp32", device=device, progress=progress)
        return fill_initial(build_model(self.description.config, torch.float32, device), seed)

    def trainer(
        self,
        config: TrainConfig,
        device: str,
        checkpoint: Path | None,
        progress: Progress | None,
        mesh: Mesh | None = None,
    ) -> Trainer:
        """With the weights of a checkpoint of the run, where there is one."""
        grow_blocks(device)
        if config.lora.rank is not None:
            return self._adapter_trainer(config, device, checkpoint, progress, mesh)
        weights = self if checkpoint is None else replace(self, path=checkpoint)
        if mesh is not None and not mesh.layout.is_single:
            return weights.rank_trainer(config, mesh, progress)
        model = weights.load(device, config.seed, progress)
        rounded = None
        if config.qat.is_given:
            rounded = found_roundings(model, *config.qat.parsed)
        teacher = self._load_teacher(config, device, progress)
        return Trainer(model, config, rounded=rounded, teacher=teacher)

    def rank_trainer(
        self, config: TrainConfig, mesh: Mesh, progress: Progress | None
    ) -> RankTrainer:
        """This rank's part of it; no rank has the whole."""
        model = self.description.config
        if self.path is not None:
            tensors = stored_tensors(self.path, progress)
        else:
            tensors = initial_weights(model, config.seed, mesh.device)
        teacher = self._load_teacher(config, str(mesh.device), progress)
        return rank_trainer(model, config, mesh, tensors, teacher=teacher)

    def _adapter_trainer(
        self,
        config: TrainConfig,
        device: str,
        checkpoint: Path | None,
        progress: Progress | None,
        mesh: Mesh | None,
    ) -> Trainer:
        """The base as it is, in the dtype that is computed in, codes as codes."""
        assert self.path is not None, "check_complete"
        dtype = PRECISIONS[config.precision].dtype
        if mesh is not None and mesh.layout.shard > 1:
            tensors = stored_tensors(self.path, progress)
            model, learned = sharded_base(
                self.description, config.lora, mesh, dtype, tensors, config.seed
            )
        else:
            model = load_model(
                self.path, dtype=dtype_name(dtype), device=device, keep_codes=True,
                progress=progress,
            )  # fmt: skip
            if device == "cpu":  # decoding takes longer than a product there
                keep_copies(model)
            learned = add_adapters(model, self.description, config.lora, config.seed)
        if checkpoint is not None:
            read_adapter(model, checkpoint)
        teacher = self._load_teacher(config, device, progress)
        if mesh is not None and not mesh.layout.is_single:
            return adapter_trainer(model, config, learned, mesh, teacher)
        return Trainer(model, config, learned, teacher=teacher)

    def _load_teacher(
        self, config: TrainConfig, device: str, progress: Progress | None
    ) -> Transformer | None:
        if self.teacher is None:
            return None
        return self.teacher.load(dtype_name(PRECISIONS[config.precision].dtype), device, progress)

    def exporter(self, config: TrainConfig) -> Exporter | AdapterExporter:
        assert self.tokenizer is not None, "a run has one"
        files = self.tokenizer.files()
        if config.lora.rank is None:
            return Exporter(self.description, files)
        return AdapterExporter(config.lora, str(config.model), files)


def stored_names(codes: Mapping[str, Scheme]) -> str:
    return ", ".join(sorted({scheme.name for scheme in codes.values()}))


def teacher_source(
    config: TrainConfig, student: ModelConfig, progress: Progress | None
) -> TeacherModel | None:
    if config.distill.teacher is None:
        return None
    path = resolve_model(config.distill.teacher, progress=progress)
    teacher = describe(open_checkpoint(path)).config
    vocab_size = teacher.vocab_size
    if vocab_size != student.vocab_size:
        raise UsageError(
            f"--distill {config.distill.teacher} has a vocabulary of {vocab_size:,} tokens, and "
            f"the model has {student.vocab_size:,}; give a teacher with the model's tokenizer"
        )
    return TeacherModel(path, teacher)


def model_source(config: TrainConfig, progress: Progress | None = None) -> StartingModel:
    if config.model is not None:
        path = resolve_model(config.model, progress=progress)
        description = describe(open_checkpoint(path))
        return StartingModel(description, _tokenizer(path), path)
    assert config.shape is not None, "check_complete"
    shape = shape_values(config.shape)  # whose error names the shapes there are
    if config.tokenizer is None:
        raise UsageError(
            "--shape has no tokenizer; add --tokenizer MODEL for the one of a model, e.g. demo"
        )
    tokenizer = _tokenizer(resolve_model(config.tokenizer, progress=progress))
    vocab_size = -(-tokenizer.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
    values = shape | {"vocab_size": vocab_size}
    return StartingModel(describe_hf(values, origin=f"shape {config.shape}"), tokenizer, None)


def untokenized_source(config: TrainConfig, progress: Progress | None = None) -> StartingModel:
    """For steps over random tokens: no tokenizer is needed, and a shape keeps its vocabulary."""
    if config.model is None:
        assert config.shape is not None, "check_one"
        return StartingModel(describe_shape(config.shape), None, None)
    path = resolve_model(config.model, progress=progress)
    return StartingModel(describe(open_checkpoint(path)), None, path)


def _tokenizer(path: Path) -> Tokenizer:
    tokenizer = tokenizer_of(path)
    if tokenizer is None:
        raise UnsupportedError(f"{path} has no tokenizer, which training on text needs")
    return tokenizer
