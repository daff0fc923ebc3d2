"""What a training config may have on several ranks. The rest is refused by name, never ignored.

check_under_layout(config)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ridgeline.errors import UsageError
from ridgeline.parallel.bubbles import check_micro_batches
from ridgeline.parallel.context import check_sequence
from ridgeline.parallel.layout import Layout, divisor_below


def check_under_layout(config: Any) -> None:
    """Of a TrainConfig, which stands above this file."""
    layout: Layout = config.layout
    if layout.is_single:
        return
    for what, remedy in _undone(config):
        raise UsageError(f"{what} is not done on several ranks (layout {layout.words()}); {remedy}")
    sequences, micro = config.batch.size, config.batch.micro
    own = len(layout.sequences(0, sequences))
    if micro is not None and own % micro:
        raise UsageError(
            f"micro_batch is {micro}, which does not divide the {own} sequences that each rank has "
            f"of a batch of {sequences}; try {divisor_below(own, micro)}"
        )
    if micro is not None and layout.pipeline > 1:
        check_micro_batches(layout, own // micro)
    check_sequence(layout, config.data.sequence_length)


def _undone(config: Any) -> Iterator[tuple[str, str]]:
    layout = config.layout
    flags = {
        "--lora": config.lora.rank is not None,
        "--qat or --sparsity": config.qat.is_given,
        "--distill": config.distill.teacher is not None,
    }
    for flag, is_given in flags.items():
        if is_given and layout.size_of("data") != layout.size:
            yield f"{flag} with other axes than replicate and shard", "use these"
    if config.qat.sparsity is not None and layout.shard > 1:
        yield "--sparsity with shard", "use replicate"
    if config.graphs:
        yield "--graphs", "remove it"
    if config.precision.startswith("fp8"):
        yield f"--precision {config.precision}", "use bf16"
    if config.optimizer.moments == "8-bit" and config.lora.rank is None:
        yield "--moments 8-bit, whose scales belong to whole tensors,", "use bf16"
