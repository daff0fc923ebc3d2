"""How a model is run, and what its machine could do: what the model of a step looks at.

state = State(config, recipe, "engine", hardware, bytes_per_weight=2.0, bytes_per_kv=2.0)
state.is_fused, state.bandwidth, state.cost(work)
"""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.formats.dtypes import parse_dtype
from ridgeline.hardware import Hardware
from ridgeline.models import ModelConfig
from ridgeline.models.cost import MeanStep, StepCost, kv_bytes_per_token, mean_step_cost
from ridgeline.profiling.predicting.prediction import BlockBytes, LoopName
from ridgeline.quantization.scheme import parse_scheme
from ridgeline.quantization.sizes import weight_bytes
from ridgeline.recipe import Recipe, usual_memory_share

# Where a ceiling is not known. What is compared are ratios, in which most of it cancels.
USUAL_BANDWIDTH = {"gpu": 2e12, "cpu": 2e10}  # B/s
USUAL_MATRIX = {"gpu": 3e14, "cpu": 2e11}  # FLOP/s


def multiplies_blocks(recipe: Recipe, loop: LoopName) -> bool:
    """Whether a GGUF file's blocks are multiplied as they are, the head's among them."""
    return loop == "engine" and bool(recipe.blocks) and recipe.scheme is None


@dataclass(frozen=True)
class RunState:
    """How a model is run."""

    config: ModelConfig
    recipe: Recipe
    loop: LoopName
    hardware: Hardware
    bytes_per_weight: float
    bytes_per_kv: float
    blocks: BlockBytes | None = None

    @property
    def on_gpu(self) -> bool:
        return self.hardware.device_type != "cpu"

    @property
    def is_fused(self) -> bool:
        """Whether the engine's own kernels run: on a GPU it has no others."""
        return self.loop == "engine" and (self.on_gpu or self.recipe.kernels == "fused")

    @property
    def own_blocks(self) -> BlockBytes | None:
        """Where they are multiplied."""
        return self.blocks if multiplies_blocks(self.recipe, self.loop) else None

    @property
    def uses_graphs(self) -> bool:
        return self.loop == "engine" and self.on_gpu and bool(self.recipe.graphs)

    @property
    def overlaps(self) -> bool:
        """Where nothing is said, a GPU does."""
        return self.on_gpu and self.recipe.overlap is not False

    @property
    def rounds_to_tf32(self) -> bool:
        """Whether products of fp32 go through a GPU's matrix units."""
        return self.on_gpu and self.recipe.tf32 and self.recipe.dtype == "fp32"

    @property
    def bandwidth(self) -> float:
        read = self.hardware.ceiling("read_bandwidth") or self.hardware.ceiling("memory_bandwidth")
        return read.value if read is not None else USUAL_BANDWIDTH[self._kind]

    def matrix_rate(self, dtype: str) -> float:
        ceiling = self.hardware.ceiling(f"matrix_{dtype}")
        if ceiling is None and dtype in ("fp8", "int8"):  # multiplied as 16-bit numbers then
            return self.matrix_rate(self.recipe.dtype)
        return ceiling.value if ceiling is not None else USUAL_MATRIX[self._kind]

    @property
    def _kind(self) -> str:
        return "gpu" if self.on_gpu else "cpu"

    def requests_held(self, tokens: float) -> float:
        """Whose pages fit beside the weights, if each has so many tokens."""
        recipe, scheme, head = self.recipe, self.recipe.scheme, self.recipe.head
        weights = weight_bytes(
            self.config,
            parse_dtype(recipe.dtype),
            None if scheme is None else parse_scheme(scheme),
            head=None if head == "plain" else parse_scheme(head),
        )
        share = recipe.limits.memory_share or usual_memory_share(self.on_gpu)
        room = share * self.hardware.memory_bytes - weights / recipe.parallel.tensor
        each = tokens * kv_bytes_per_token(self.config, self.bytes_per_kv) / recipe.parallel.tensor
        return max(0.0, room / each)

    def cost(self, work: MeanStep) -> StepCost:
        sizes = {"weight_bytes": self.bytes_per_weight, "kv_bytes": self.bytes_per_kv}
        return mean_step_cost(self.config, work, **sizes)
