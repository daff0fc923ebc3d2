"""Recipe: how a model is executed, from its dtype to the limits of a batch.

Small parts that hold each other, each checked when it is made; nothing is changed in place. What is
left to "auto" is filled in by `with_auto` once model and device are known, and the choice is a new
recipe. It is saved beside a checkpoint as `recipe.json`; the ladder is a sequence of edits to it.

    recipe = Recipe(kv=KV(dtype="fp8"), limits=Limits(max_context=8192))
    recipe = edited(recipe, "kv.page_size", 128)
    recipe.save(Path("out")); Recipe.load(Path("out")) == recipe

A field's metadata holds what the command line shows: `help`, and `flag` where the flag is not the
field's own name. Quantization schemes are names here; what one means, quantization says.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from ridgeline.errors import ContextLengthError, UsageError, answers_wrong_options
from ridgeline.formats.dtypes import dtype_name
from ridgeline.formats.fields import check_fields, config_from, dotted_fields, field_help, flag_of
from ridgeline.formats.files import atomic_write, read_object, reject_unknown_keys
from ridgeline.kernels.autotune import parse_places
from ridgeline.kernels.pages import PAGE_SIZES
from ridgeline.kernels.prompt_lookup import LONGEST_NGRAM
from ridgeline.models import ModelConfig

FILE_NAME = "recipe.json"
VERSION = 1  # of the file's schema; raised when a field changes its meaning

Dtype = Literal["auto", "bf16", "fp16", "fp32"]
KVDtype = Literal["auto", "bf16", "fp16", "fp32", "fp8", "int8"]
Kernels = Literal["auto", "fused", "reference"]
Head = Literal["plain", "int8"]
SpeculationMethod = Literal["none", "prompt-lookup", "draft"]


@answers_wrong_options()
@dataclass(frozen=True)
class KV:
    """The cache of keys and values."""

    dtype: KVDtype = field(
        default="auto",
        metadata=field_help(
            "dtype of the KV cache; fp8 and int8 have scales per token and head (auto: as --dtype)",
            flag="kv-dtype",
        ),
    )
    page_size: int = field(
        default=64, metadata=field_help("tokens per page of the KV cache", minimum=1)
    )
    prefix_cache: bool = field(
        default=True, metadata=field_help("reuse KV pages between requests that share a prefix")
    )

    def __post_init__(self) -> None:
        check_fields(self)
        if self.page_size not in PAGE_SIZES:
            near = min(PAGE_SIZES, key=lambda size: abs(size - self.page_size))
            sizes = ", ".join(map(str, PAGE_SIZES))
            raise UsageError(f"page_size is {self.page_size}; allowed are {sizes}; try {near}")


class FilledLimits(NamedTuple):
    """`Limits` with nothing left open."""

    max_context: int
    max_batch: int
    token_budget: int
    max_graph_batch: int
    memory_share: float


@answers_wrong_options()
@dataclass(frozen=True)
class Limits:
    """How much is taken on at once."""

    max_context: int | None = field(
        default=None,
        metadata=field_help(
            "longest request in tokens, prompt plus output (default: the model's)", minimum=1
        ),
    )
    max_batch: int | None = field(
        default=None,
        metadata=field_help(
            "most requests that run at once (default: 512 on a GPU, 128 on a CPU)", minimum=1
        ),
    )
    token_budget: int | None = field(
        default=None,
        metadata=field_help(
            "most tokens per step, prompts and decodes together "
            "(default: 8192 on a GPU, 512 on a CPU)",
            minimum=1,
        ),
    )
    max_graph_batch: int = field(
        default=2048,
        metadata=field_help(
            "largest step, in tokens, that is captured as a graph", minimum=1, maximum=2048
        ),
    )
    memory_share: float | None = field(
        default=None,
        metadata=field_help(
            "share of free memory to use (default: 0.9 on a GPU, 0.5 on a CPU)",
            minimum=0.01,
            maximum=1.0,
        ),
    )

    def __post_init__(self) -> None:
        check_fields(self)
        if self.max_batch and self.token_budget and self.token_budget < self.max_batch:
            raise UsageError(
                f"token_budget is {self.token_budget} and max_batch {self.max_batch}; each running "
                f"request needs a token in every step; give a token_budget of at least "
                f"{self.max_batch}, or a smaller max_batch"
            )

    def filled(self) -> FilledLimits:
        """The limits as numbers, once `with_auto` has chosen those that were left open."""
        values = {name: getattr(self, name) for name in FilledLimits._fields}
        assert None not in values.values(), f"with_auto comes first: {values}"
        return FilledLimits(**values)


@answers_wrong_options()
@dataclass(frozen=True)
class Speculation:
    """Drafting tokens ahead, to verify several in one pass."""

    method: SpeculationMethod = field(
        default="none",
        metadata=field_help(
            "draft tokens ahead: by lookup in the text so far, or with a draft model",
            flag="speculation",
        ),
    )
    max_draft_tokens: int = field(
        default=11,
        metadata=field_help(
            "most tokens drafted ahead; each step drafts as many as pay off", minimum=1, maximum=32
        ),
    )
    max_ngram: int = field(
        default=4,
        metadata=field_help(
            "prompt-lookup: longest n-gram to match, in tokens",
            minimum=1,
            maximum=LONGEST_NGRAM,
        ),
    )
    min_ngram: int = field(
        default=2,
        metadata=field_help("prompt-lookup: shortest n-gram to match, in tokens", minimum=1),
    )
    draft_model: str | None = field(
        default=None,
        metadata=field_help("draft: a small model with the same tokenizer"),
    )

    def __post_init__(self) -> None:
        check_fields(self)
        if self.min_ngram > self.max_ngram:
            raise UsageError(
                f"min_ngram is {self.min_ngram} and max_ngram {self.max_ngram}; "
                "give a min_ngram that is not above max_ngram"
            )
        if self.method == "draft" and not self.draft_model:
            raise UsageError("speculation is draft and there is no draft_model; name one")
        if self.method != "draft" and self.draft_model is not None:
            raise UsageError(
                f"draft_model is {self.draft_model!r} and speculation {self.method}; "
                "use speculation draft, or leave draft_model out"
            )


@answers_wrong_options()
@dataclass(frozen=True)
class Parallel:
    """How many devices the model is split over."""

    tensor: int = field(
        default=1,
        metadata=field_help(
            "split every matrix over N devices", flag="tensor-parallel", minimum=1, maximum=1024
        ),
    )
    expert: int = field(
        default=1,
        metadata=field_help(
            "of a mixture, give each of the N devices of --tensor-parallel some experts whole, "
            "instead of some columns of each",
            flag="expert-parallel",
            minimum=1,
            maximum=1024,
        ),
    )
    pipeline: int = field(
        default=1,
        metadata=field_help(
            "cut the layers in N stages, each on devices of its own (as many as --tensor-parallel)",
            flag="pipeline-parallel",
            minimum=1,
            maximum=1024,
        ),
    )

    def __post_init__(self) -> None:
        check_fields(self)
        if self.expert not in (1, self.tensor):
            raise UsageError(
                f"expert_parallel is {self.expert} and tensor_parallel {self.tensor}; experts are "
                "spread over the devices that share all else: give both the same number"
            )

    @property
    def num_ranks(self) -> int:
        """Devices, each with a process of its own."""
        return self.tensor * self.pipeline


@answers_wrong_options(KV, Limits, Speculation, Parallel)
@dataclass(frozen=True)
class Recipe:
    """How a model is executed."""

    dtype: Dtype = field(
        default="auto",
        metadata=field_help("dtype of the computation and of weights that are not quantized"),
    )
    kernels: Kernels = field(
        default="auto",
        metadata=field_help(
            "fused kernels, or each op's PyTorch reference (auto: fused, on a CPU where they can "
            "be built)"
        ),
    )
    graphs: bool | None = field(
        default=None,
        metadata=field_help("capture small steps as CUDA graphs (default: yes on a GPU)"),
    )
    scheme: str | None = field(
        default=None,
        metadata=field_help("quantize the weights while loading, e.g. int8, int4-g128 or fp8"),
    )
    blocks: bool | None = field(
        default=None,
        metadata=field_help(
            "on a CPU, multiply a GGUF file's blocks as they are, inputs in int8 (default: unless "
            "a dtype, scheme or deterministic is asked for, or there is no C++ compiler)"
        ),
    )
    head: Head = field(
        default="plain",
        metadata=field_help(
            "output head: in --dtype, or int8 with a scale per row (of a tied embedding, a copy)"
        ),
    )
    quantize_all: bool = field(
        default=False,
        metadata=field_help(
            "quantize even the matrices that measure slower when quantized on this device, which "
            "are otherwise left as they are"
        ),
    )
    copies: bool | None = field(
        default=None,
        metadata=field_help(
            "also keep unquantized copies of int8 and int4 weights, for steps of many tokens "
            "(default: on a GPU with memory to spare)"
        ),
    )
    tf32: bool = field(
        default=False, metadata=field_help("use tf32 tensor cores for fp32 matmuls; requires a GPU")
    )
    tuned: bool = field(
        default=True,
        metadata=field_help(
            "on a GPU, use kernel settings measured for it and the CUDA C++ kernels; otherwise "
            "Triton with default settings"
        ),
    )
    tiles: str | None = field(
        default=None,
        metadata=field_help(
            "of an op's measured kernel tiles take not the fastest but so many places behind it, "
            "e.g. skinny_linear=2,rms_norm=1; `ridgeline tune serve` finds them; requires a GPU"
        ),
    )
    deterministic: bool = field(
        default=False,
        metadata=field_help("same tokens bit for bit, whatever else is in the batch; slower"),
    )
    overlap: bool | None = field(
        default=None,
        metadata=field_help(
            "launch the next step before the last one's tokens are on the host (default: yes on a "
            "GPU; a CPU computes a step while it is launched, and each token would come a step "
            "later)"
        ),
    )
    kv: KV = field(default_factory=KV)
    limits: Limits = field(default_factory=Limits)
    speculation: Speculation = field(default_factory=Speculation)
    parallel: Parallel = field(default_factory=Parallel)

    def __post_init__(self) -> None:
        check_fields(self)
        if self.scheme is not None and not re.fullmatch(r"[a-z0-9]+([-_.][a-z0-9]+)*", self.scheme):
            raise UsageError(
                f"scheme is {self.scheme!r}; a name has small letters and digits with dashes "
                "between them; try int4-g128, int8 or fp8"
            )
        if self.tiles:
            parse_places(self.tiles)

    def save(self, folder: Path) -> Path:
        """Write `recipe.json` into a folder, whole or not at all, and return its path."""
        path = Path(folder) / FILE_NAME
        with atomic_write(path) as file:
            json.dump({"version": VERSION} | asdict(self), file, indent=2)
            file.write("\n")
        return path

    @classmethod
    def load(cls, path: Path) -> Recipe:
        """From a `recipe.json`, the folder it lies in, or a plan that holds one."""
        path = Path(path) / FILE_NAME if Path(path).is_dir() else Path(path)
        document = read_object(path, "the recipe")
        planned = document.get("recipe")
        return recipe_from(planned if isinstance(planned, dict) else document, str(path))


def recipe_from(document: Mapping[str, Any], origin: str = FILE_NAME) -> Recipe:
    """A recipe from the fields of its file. Fields left out keep their defaults."""
    values = dict(document)
    version = values.pop("version", None)
    if version != VERSION:
        raise UsageError(
            f"{origin} is a recipe of version {version!r}; this Ridgeline reads version {VERSION}; "
            "write it again with the Ridgeline that is installed"
        )
    recipe: Recipe = config_from(Recipe, values, origin)
    return recipe


def edited(recipe: Recipe, name: str, value: Any) -> Recipe:
    """The recipe with one field changed, named as `scheme` or `kv.dtype`."""
    reject_unknown_keys([name], field_table(), "a recipe")
    part, _, own = name.rpartition(".")
    if not part:
        return replace(recipe, **{name: value})
    return replace(recipe, **{part: replace(getattr(recipe, part), **{own: value})})


def edited_at_once(recipe: Recipe, edit: Mapping[str, Any]) -> Recipe:
    """The recipe with several fields changed; what does not go together is checked in the end."""
    reject_unknown_keys(edit, field_table(), "a recipe")
    whole = {name: value for name, value in edit.items() if "." not in name}
    parts: dict[str, dict[str, Any]] = {}
    for name, value in edit.items():
        part, _, own = name.rpartition(".")
        if part:
            parts.setdefault(part, {})[own] = value
    return replace(
        recipe,
        **whole,
        **{part: replace(getattr(recipe, part), **values) for part, values in parts.items()},
    )


def dotted_values(recipe: Recipe) -> dict[str, Any]:
    """Every field by its dotted name."""
    return {name: attrgetter(name)(recipe) for name in field_table()}


def flag(name: str) -> str:
    """The flag of a field: `--kv-dtype` for `kv.dtype`."""
    return "--" + flag_of(field_table()[name])


@cache
def field_table() -> dict[str, Any]:
    """Every field that can be edited, by its dotted name: `dtype`, …, `parallel.tensor`."""
    return dict(dotted_fields(Recipe))


def with_auto(recipe: Recipe, config: ModelConfig, dtype: torch.dtype, device: str) -> Recipe:
    """The recipe with nothing left to "auto", for this model in this dtype on this device."""
    on_gpu = device != "cpu"
    if not on_gpu and recipe.graphs:
        raise UsageError("graphs are on, which needs a GPU, and the device is a CPU; leave it out")
    model_dtype: Any = dtype_name(dtype) if recipe.dtype == "auto" else recipe.dtype
    kernels: Kernels = "fused" if on_gpu else "reference"
    has_graphs = on_gpu and recipe.parallel.pipeline == 1
    return replace(
        recipe,
        dtype=model_dtype,
        kernels=kernels if recipe.kernels == "auto" else recipe.kernels,
        graphs=has_graphs if recipe.graphs is None else recipe.graphs,
        overlap=on_gpu if recipe.overlap is None else recipe.overlap,
        kv=replace(recipe.kv, dtype=model_dtype) if recipe.kv.dtype == "auto" else recipe.kv,
        limits=_filled_limits(recipe.limits, config.max_context, on_gpu),
    )


def _filled_limits(limits: Limits, model_context: int, on_gpu: bool) -> Limits:
    context = limits.max_context or model_context
    if context > model_context:
        raise ContextLengthError(
            f"max_context is {context}; the model reaches {model_context} tokens; "
            f"give at most {model_context}"
        )
    # One of the two may be given: the other then follows it, so that each request has its token.
    batch, budget = usual_limits(on_gpu)
    batch = limits.max_batch or min(batch, limits.token_budget or batch)
    return replace(
        limits,
        max_context=context,
        max_batch=batch,
        token_budget=limits.token_budget or max(budget, batch),
        memory_share=limits.memory_share or usual_memory_share(on_gpu),
    )


class UsualLimits(NamedTuple):
    max_batch: int
    token_budget: int


def usual_limits(on_gpu: bool) -> UsualLimits:
    return UsualLimits(512, 8192) if on_gpu else UsualLimits(128, 512)


def usual_memory_share(on_gpu: bool) -> float:
    return 0.9 if on_gpu else 0.5
