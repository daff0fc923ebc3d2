"""What of a model is learned, and from what: parts of TrainConfig (config.py).

TrainConfig(model="demo", lora=LoraOptions(rank=16), ...)
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ridgeline.errors import UsageError, answers_wrong_options
from ridgeline.formats.fields import check_fields, field_help

if TYPE_CHECKING:
    from ridgeline.quantization.methods.sparsity import Sparsity
    from ridgeline.quantization.scheme import Scheme


@answers_wrong_options()
@dataclass(frozen=True)
class LoraOptions:
    """Adapters: two thin matrices beside each projection, which alone are learned."""

    rank: int | None = field(
        default=None,
        metadata=field_help(
            "learn adapters of this rank instead of the weights", flag="lora", minimum=1
        ),
    )
    alpha: float | None = field(
        default=None,
        metadata=field_help(
            "an adapter's product counts alpha / rank times (default: twice the rank)",
            flag="lora-alpha",
            minimum=1e-6,
            maximum=1e6,
        ),
    )
    targets: str | None = field(
        default=None,
        metadata=field_help(
            "projections that get adapters, by their names in the checkpoint, e.g. q_proj,v_proj "
            "(default: all of every layer, experts aside)",
            flag="lora-targets",
        ),
    )

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("alpha", "targets"):
            if self.rank is None and getattr(self, name) is not None:
                raise UsageError(f"--lora-{name} needs adapters; add --lora RANK")
        if self.targets is not None and not self.target_names:
            raise UsageError(f"lora_targets is {self.targets!r}; give names, e.g. q_proj,v_proj")

    @property
    def target_names(self) -> tuple[str, ...]:
        names = (name.strip() for name in (self.targets or "").split(","))
        return tuple(dict.fromkeys(name for name in names if name))

    @property
    def scale(self) -> float:
        assert self.rank is not None, "adapters have a rank"
        return self.whole_alpha / self.rank

    @property
    def whole_alpha(self) -> float:
        assert self.rank is not None, "adapters have a rank"
        return 2.0 * self.rank if self.alpha is None else self.alpha


@answers_wrong_options()
@dataclass(frozen=True)
class QatOptions:
    """Weights that are rounded, or zero, in every product while they are learned."""

    scheme: str | None = field(
        default=None,
        metadata=field_help(
            "compute with weights rounded to this scheme of `ridgeline quantize`, e.g. int4-g64",
            flag="qat",
        ),
    )
    sparsity: str | None = field(
        default=None,
        metadata=field_help("of a pruned model: its zeros stay zero; 2:4, or a share, e.g. 0.5"),
    )

    def __post_init__(self) -> None:
        from ridgeline.quantization.methods.sparsity import parse_sparsity
        from ridgeline.quantization.scheme import parse_scheme

        check_fields(self)
        if self.scheme is not None and parse_scheme(self.scheme).inputs != "16-bit":
            raise UsageError(
                f"--qat {self.scheme} rounds inputs too, and training rounds weights alone; use "
                "int8 or int4-g64"
            )
        if self.sparsity is not None:
            parse_sparsity(self.sparsity)

    @property
    def is_given(self) -> bool:
        return self.scheme is not None or self.sparsity is not None

    @property
    def parsed(self) -> tuple[Scheme | None, Sparsity | None]:
        from ridgeline.quantization.methods.sparsity import parse_sparsity
        from ridgeline.quantization.scheme import parse_scheme

        return (
            None if self.scheme is None else parse_scheme(self.scheme),
            None if self.sparsity is None else parse_sparsity(self.sparsity),
        )


@answers_wrong_options()
@dataclass(frozen=True)
class DistillOptions:
    """Another model's probabilities as what is learned."""

    teacher: str | None = field(
        default=None,
        metadata=field_help("learn this model's probabilities of the next token", flag="distill"),
    )
    weight: float = field(
        default=1.0,
        metadata=field_help(
            "share of the loss that is the divergence from it; the rest is that of the text",
            flag="distill-weight",
            minimum=0.0,
            maximum=1.0,
        ),
    )

    def __post_init__(self) -> None:
        check_fields(self)
