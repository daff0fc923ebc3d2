"""What of a model is learned, and from what: parts of TrainConfig (config.py).

TrainConfig(model="demo", lora=LoraOptions(rank=16), ...)
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ridgeline.errors import UsageError, answers_wrong_options
from ridgeline.formats.fields import check_fields, field_help


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
