"""A shape with random weights as a source: they are drawn on the device while it loads, and those
that become codes one matrix at a time, so that a shape that fits only quantized loads too.
"""

from __future__ import annotations

from ridgeline.engine.loading.load_plan import LoadPlan, SourceForm
from ridgeline.engine.loading.sources import SCHEMES, WholeSource
from ridgeline.hardware import detect
from ridgeline.hardware.detection import available_memory
from ridgeline.models import Transformer
from ridgeline.models.shapes import RandomShape
from ridgeline.progress import Progress
from ridgeline.quantization.load import pick_dtype
from ridgeline.quantization.nearest import draw_nearest
from ridgeline.quantization.scheme import parse_scheme
from ridgeline.recipe import Recipe


class ShapeSource(WholeSource):
    advised = SCHEMES

    def __init__(self, shape: RandomShape, device: str) -> None:
        self.shape, self.hardware = shape, detect(device)
        self.device = self.hardware.device
        self.config = shape.description.config

    def form(self, recipe: Recipe) -> SourceForm:
        scheme = None if recipe.scheme is None else parse_scheme(recipe.scheme)
        return SourceForm(pick_dtype(recipe.dtype, self.config, self.hardware, scheme))

    def free_bytes(self, recipe: Recipe) -> int:
        return available_memory(self.device)

    def weights(self, plan: LoadPlan, progress: Progress | None) -> Transformer:
        dtype, shape = plan.form.dtype, self.shape
        if plan.scheme is None:
            return shape.whole(dtype, self.device)
        return draw_nearest(
            shape.description, plan.scheme, dtype, self.device, shape.seed, plan.plain
        )
