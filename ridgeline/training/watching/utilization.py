"""MFU: the FLOPs that a step's loss and gradients need, over what the device could have done in its
time.

Counted is what the model needs (models/training_cost.py): pairs that a token may see in its own
document and window, heads of tokens that have a target, and no token behind the last target of its
document, which changes nothing; neither is padding, nor what is computed again. Of a frozen model
(adapters) no gradients of weights are counted, of a teacher the forward pass. The rate is the
datasheet's for the precision's products, and beside it the one that was measured here. A device
that is not in the table has no datasheet, and then no MFU: never another device's. fp8 is held
against bf16's rate, as its peers do.

    used = Utilization(model_config, load_cached(detect()), "bf16")
    used.shares(used.flops(batches), step_s)        # {"mfu": 0.546, "mfu_measured": 0.68}
"""

from __future__ import annotations

from collections.abc import Iterable

from ridgeline.data.loading.packing import PackedBatch
from ridgeline.hardware import Hardware
from ridgeline.models import ModelConfig
from ridgeline.models.training_cost import FROZEN_PASSES, PASSES, training_flops
from ridgeline.parallel.layout import Layout
from ridgeline.training.config import Precision

# Whose rate the products of a precision are held against.
RATES: dict[str, str] = {
    "fp32": "matrix_fp32",
    "tf32": "matrix_tf32",
    "fp16": "matrix_fp16",
}
USUAL_RATE = "matrix_bf16"


def rate_key(precision: Precision) -> str:
    assert precision != "auto", "with_auto comes first"
    return RATES.get(precision, USUAL_RATE)


class Utilization:
    def __init__(
        self,
        model: ModelConfig,
        hardware: Hardware,
        precision: Precision,
        *,
        is_frozen: bool = False,
        teacher: ModelConfig | None = None,
        layout: Layout | None = None,
    ) -> None:
        key = rate_key(precision)
        promised, measured = hardware.datasheet.get(key), hardware.ceilings.get(key)
        self._passes = FROZEN_PASSES if is_frozen else PASSES
        self._model, self._teacher = model, teacher
        layout = layout or Layout()
        self._devices = layout.tensor * layout.pipeline  # that share a rank's batch
        # Of a part of a sequence the pairs that its tokens see are not known from the part alone.
        self._is_known = layout.context == 1
        self.promised = None if promised is None else promised.value  # FLOP/s
        self.measured = None if measured is None else measured.value

    def flops(self, batches: Iterable[PackedBatch]) -> float:
        """Of a step over these, on each device; read from numbers that the host has."""
        return sum(self._batch_flops(batch) for batch in batches) / self._devices

    def _batch_flops(self, batch: PackedBatch) -> float:
        documents, num_targets = batch.learned, batch.num_targets
        flops = training_flops(self._model, documents, num_targets, self._passes).total
        if self._teacher is not None:
            flops += training_flops(self._teacher, documents, num_targets, passes=1).total
        return flops

    def shares(self, flops: float, seconds: float) -> dict[str, float | None]:
        """None where nothing is known of the device."""
        rates = {"mfu": self.promised, "mfu_measured": self.measured}
        return {
            name: None
            if rate is None or seconds <= 0 or not self._is_known
            else flops / seconds / rate
            for name, rate in rates.items()
        }
