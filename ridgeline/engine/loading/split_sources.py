"""The weights that one of several ranks loads its part from: a checkpoint, tensor by tensor, or a
model that is whole on this rank or on rank 0.

Every rank makes the same plan, from the least memory that is free on any of them, and calls what
the others call.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TypeVar

import torch

from ridgeline.data import Tokenizer
from ridgeline.engine.loading.draft_loading import load_draft
from ridgeline.engine.loading.load_plan import LoadPlan, Source, SourceForm
from ridgeline.engine.loading.saved import tokenizer_of
from ridgeline.engine.loading.sources import SCHEMES, keeps_codes
from ridgeline.engine.memory.footprint import KeptSchemes
from ridgeline.engine.memory.parts import part_of, stages_of
from ridgeline.hardware import detect
from ridgeline.hardware.detection import available_memory
from ridgeline.models import ModelConfig, Transformer, build_model
from ridgeline.models.checkpoint import open_checkpoint
from ridgeline.models.families import describe
from ridgeline.parallel.inference.coded import check_cut, is_cut
from ridgeline.parallel.inference.filling import (
    RoundedLayers,
    cut_weights,
    load_split_codes,
    load_split_nearest,
    load_split_weights,
    sent_parameters,
)
from ridgeline.parallel.inference.group import Group
from ridgeline.parallel.inference.tensor import quantize_split_head, split_model
from ridgeline.progress import Progress
from ridgeline.quantization.choose import LayerChoice
from ridgeline.quantization.files.fuse import kept_schemes
from ridgeline.quantization.files.read import is_quantized
from ridgeline.quantization.load import COMPUTE_DTYPES, pick_dtype, runnable
from ridgeline.quantization.nearest import chosen_layers
from ridgeline.quantization.scheme import parse_scheme
from ridgeline.quantization.sizes import named_matrices
from ridgeline.recipe import Recipe

Result = TypeVar("Result")


class SplitSource(Source):
    """`num_local` ranks are on this machine, each on a device of this type."""

    def __init__(self, config: ModelConfig, device_type: str, group: Group, num_local: int) -> None:
        self.config, self.group, self.num_local = config, group, num_local
        self.on_cpu = device_type == "cpu"
        self.device = "cpu" if self.on_cpu else f"cuda:{torch.cuda.current_device()}"

    def free_bytes(self, recipe: Recipe) -> int:
        if not self.on_cpu:  # what the link itself takes is then no longer free
            self.group.data.all_reduce(torch.zeros(1 << 20, device=self.device))
        # On a CPU all ranks live from the same memory.
        num_sharing = self.num_local if self.on_cpu else 1
        return self.group.smallest(available_memory(self.device) // num_sharing)

    def may_copy(self, recipe: Recipe, form: SourceForm) -> bool:
        return False

    def together(self, work: Callable[[], Result]) -> Result:
        return self.group.together(work)

    def is_slower(self, choice: LayerChoice) -> bool:
        """Each rank times its own part: what is slower on one is plain on all."""
        return bool(self.group.largest(not choice.quantize))

    def advised_of(self, schemes: Collection[str]) -> list[str]:
        """Those that the ranks can share."""
        size = self.group.size
        return [name for name in schemes if is_cut(self.config, size, parse_scheme(name))]

    def weights(self, plan: LoadPlan, progress: Progress | None) -> Transformer:
        rounding = self._rounding(plan)
        coded = plan.form.codes or {} if rounding is None else rounding.layers
        dtype, expert = plan.form.dtype, plan.recipe.parallel.expert
        model = self.group.together(
            lambda: split_model(self.config, dtype, self.device, self.group, coded, expert)
        )
        self.fill(model, plan, rounding, progress if self.group.leads else None)
        return model

    def _rounding(self, plan: LoadPlan) -> RoundedLayers | None:
        """The projections that become codes now: as many as on one device. Of which shapes they
        stay plain is told by a rank's part.
        """
        scheme = plan.scheme
        if scheme is None:
            return None
        whole = build_model(self.config, plan.form.dtype, "meta")
        parts = dict(named_matrices(part_of(self.config, plan.recipe)))
        names = self.group.together(lambda: chosen_layers(whole, scheme))
        return RoundedLayers(scheme, {name for name in names if parts[name] not in plan.plain})

    @abstractmethod
    def fill(
        self,
        model: Transformer,
        plan: LoadPlan,
        rounding: RoundedLayers | None,
        progress: Progress | None,
    ) -> None:
        """Write this rank's part of each weight."""

    def finished(self, model: Transformer, plan: LoadPlan) -> Transformer:
        if plan.recipe.head != "plain":
            scheme = parse_scheme(plan.recipe.head)

            def quantize() -> None:
                if self.group.stage == 0:
                    quantize_split_head(model, scheme)

            self.group.together(quantize)
        return model

    def draft(self, plan: LoadPlan, model: Transformer) -> Transformer | None:
        """Rank 0 drafts for all (execution/rank_drafts.py)."""
        mine = plan.draft if self.group.leads else None
        return self.group.together(lambda: load_draft(mine, model))


class SplitCheckpoint(SplitSource):
    def __init__(self, path: Path, device_type: str, group: Group, num_local: int) -> None:
        self.path, self.checkpoint = path, open_checkpoint(path)
        self.description = describe(self.checkpoint)
        super().__init__(self.description.config, device_type, group, num_local)
        self.advised = [] if is_quantized(self.checkpoint) else self.advised_of(SCHEMES)

    def form(self, recipe: Recipe) -> SourceForm:
        """The dtype that one rank would choose; the smaller one, if a rank is short of memory. The
        checkpoint's codes where they can be kept.
        """
        held = self.config if self.on_cpu else next(stages_of(self.config, recipe)).config
        scheme = None if recipe.scheme is None else parse_scheme(recipe.scheme)
        stored: KeptSchemes = {}
        if keeps_codes(recipe):
            stored = kept_schemes(self.checkpoint, self.description)
        own = self.group.together(
            lambda: pick_dtype(recipe.dtype, held, detect(self.device), scheme, stored)
        )
        dtype = COMPUTE_DTYPES[self.group.largest(COMPUTE_DTYPES.index(own))]
        codes = runnable(stored, dtype, self.device)[0] if stored else {}
        size = self.group.size
        self.group.together(lambda: check_cut(self.config, size, codes, is_chosen=False))
        return SourceForm(dtype, codes or None)

    def tokenizer(self, given: Tokenizer | None) -> Tokenizer | None:
        """Rank 0 has the requests."""
        return given if given is not None or not self.group.leads else tokenizer_of(self.path)

    def fill(
        self,
        model: Transformer,
        plan: LoadPlan,
        rounding: RoundedLayers | None,
        progress: Progress | None,
    ) -> None:
        checkpoint, description, group = self.checkpoint, self.description, self.group
        codes = plan.form.codes

        def load() -> None:
            if rounding is not None:
                load_split_nearest(model, checkpoint, description, group, rounding, progress)
            elif codes:
                load_split_codes(model, checkpoint, description, group, codes, progress)
            else:
                load_split_weights(model, checkpoint, description, group, progress)

        self.group.together(load)


class SplitModel(SplitSource):
    """`whole` is the model, where this rank has it; `is_sent` if rank 0 alone does."""

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        device_type: str,
        group: Group,
        num_local: int,
        whole: Transformer | None = None,
        is_sent: bool = False,
    ) -> None:
        super().__init__(config, device_type, group, num_local)
        self.dtype, self.whole, self.is_sent = dtype, whole, is_sent

    def form(self, recipe: Recipe) -> SourceForm:
        return SourceForm(self.dtype)

    def fill(
        self,
        model: Transformer,
        plan: LoadPlan,
        rounding: RoundedLayers | None,
        progress: Progress | None,
    ) -> None:
        if self.is_sent:
            parameters = sent_parameters(self.whole, self.config, self.dtype, self.group)
        else:
            assert self.whole is not None, "a model that is not sent is there"
            parameters = dict(self.whole.named_parameters()).__getitem__
        cut_weights(model, self.config, self.group, parameters, rounding)
