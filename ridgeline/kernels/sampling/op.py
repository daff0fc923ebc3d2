"""What the registry knows of sampling: its work, its shapes, what it is timed against."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ridgeline.kernels.cost import OpCost
from ridgeline.kernels.inputs import label, normal, strided_rows
from ridgeline.kernels.launch import target_of
from ridgeline.kernels.op import Case, ConfigSearch, Op, OpInputs, case_lists, functions
from ridgeline.kernels.sampling import reference
from ridgeline.kernels.sampling.tune_space import SamplingConfig, search_space, tune_key

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
VOCABULARY = 128256  # Llama 3's
TABLES = ("output_counts_BV", "prompt_seen_BV", "bias_BV")


def launch(**inputs: Any) -> Tensor:
    from ridgeline.kernels.sampling import triton

    return triton.sample_rows(**inputs)


def cost(logits_BV: Tensor, **inputs: Any) -> OpCost:
    tables = [inputs[name] for name in TABLES if inputs.get(name) is not None]
    read = logits_BV.nbytes + sum(table.nbytes for table in tables)
    return OpCost(read, 8 * logits_BV.shape[0])


def make(
    shape: tuple[int, int],
    dtype: torch.dtype,
    temperature: float,
    filters: dict[str, float],
    penalties: bool,
    scale: float,
    peaks: int,
    mixed: bool,
    config: SamplingConfig | None,
    device: torch.device,
    generator: torch.Generator,
) -> OpInputs:
    """Logits of `scale`, `peaks` of them raised as a language model's are; with `mixed` every row
    has settings of its own, greedy ones among them, and the rows lie apart.
    """
    rows = shape[0]

    def each(value: float, other: float, dtype: torch.dtype = FP32) -> Tensor:
        values = torch.full((rows,), value, dtype=dtype, device=device)
        if mixed:
            values[1::3] = other
        return values

    logits = normal(shape, dtype, device, generator, scale)
    if peaks:
        places = torch.randint(shape[1], (rows, peaks), device=device, generator=generator)
        raised = torch.linspace(14.0, 6.0, peaks, device=device).expand(rows, peaks)
        logits.scatter_(1, places, raised.to(dtype))
    words = torch.randint(-(2**62), 2**62, (rows,), device=device, generator=generator)
    positions = torch.arange(rows, device=device) * 7919
    inputs: OpInputs = {
        "logits_BV": strided_rows(logits) if mixed else logits,
        "temperature_B": each(temperature, 0.0 if temperature else 1.0),
        "seed_B": words * 2 + 1,  # all 64 bits
        "position_B": positions if dtype == FP32 else positions.int(),  # either will do
    }
    if mixed:
        inputs["temperature_B"][2::5] = 1.7
    if "top_k" in filters:
        inputs["top_k_B"] = each(filters["top_k"], 0, torch.int32)
    if "top_p" in filters:
        inputs["top_p_B"] = each(filters["top_p"], 0.3)
    if "min_p" in filters:
        inputs["min_p_B"] = each(filters["min_p"], 0.0)
    if "few" in filters:
        inputs["few"] = int(filters["few"])
    if config is not None:
        inputs["config"] = config
    if penalties:
        inputs["repetition_B"] = each(1.3, 1.0)
        inputs["presence_B"] = each(0.7, 0.0)
        inputs["frequency_B"] = each(0.4, 0.0)
        counts = torch.randint(-3, 4, shape, device=device, generator=generator)
        inputs["output_counts_BV"] = counts.clamp(min=0).to(torch.int32)
        inputs["prompt_seen_BV"] = torch.rand(shape, device=device, generator=generator) < 0.3
        inputs["bias_BV"] = normal(shape, FP32, device, generator)
        inputs["bias_BV"][:, ::7] = float("-inf")
    return inputs


def case(
    shape: tuple[int, int],
    dtype: torch.dtype = FP32,
    temperature: float = 1.0,
    penalties: bool = False,
    scale: float = 3.0,
    peaks: int = 0,
    mixed: bool = False,
    config: SamplingConfig | None = None,
    **filters: float,
) -> Case:
    name = label(
        shape,
        dtype,
        f"t={temperature:g}" if temperature else "greedy",
        *(f"{key}={value:g}" for key, value in filters.items() if key != "few"),
        "few" in filters and "many groups",
        penalties and "penalties",
        scale != 3.0 and f"scale={scale:g}",
        peaks and f"{peaks} peaks",
        mixed and "mixed",
        config is not None and str(config),
    )
    make_case = partial(
        make, shape, dtype, temperature, filters, penalties, scale, peaks, mixed, config
    )
    return Case(name, make_case, dtype)


def define(few: int = 0, config: SamplingConfig | None = None, **inputs: Any) -> Tensor:
    """The definition, which takes no settings of the kernels."""
    return reference.sample_rows(**inputs)


def eager(
    logits_BV: Tensor,
    temperature_B: Tensor,
    top_k_B: Tensor | None = None,
    top_p_B: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """The usual way with torch's own ops: sort the row, mask, divide by exponential noise."""
    scaled = logits_BV.float() / temperature_B.clamp(min=1e-6).unsqueeze(1)
    if top_k_B is not None or top_p_B is not None:
        ranked, order = scaled.sort(dim=-1)
        if top_k_B is not None:
            kth = ranked.gather(1, (logits_BV.shape[1] - top_k_B.long()).unsqueeze(1))
            ranked = ranked.masked_fill(ranked < kth, float("-inf"))
        if top_p_B is not None:
            low = ranked.softmax(-1).cumsum(-1) <= 1 - top_p_B.unsqueeze(1)
            low[:, -1] = False
            ranked = ranked.masked_fill(low, float("-inf"))
        scaled = torch.empty_like(scaled).scatter_(1, order, ranked)
    return (scaled.softmax(-1) / torch.empty_like(scaled).exponential_()).argmax(-1)


def argmax(logits_BV: Tensor, **_: Any) -> Tensor:
    """torch's argmax alone: what greedy rows would take."""
    return logits_BV.argmax(-1)


SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.6},
    {"temperature": 0.8, "top_k": 5},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 1.3, "top_k": 40, "top_p": 0.8, "min_p": 0.05, "mixed": True},
    {"temperature": 0.9, "min_p": 0.1},
    {"temperature": 0.7, "penalties": True, "mixed": True},
]
# Searches among many groups, of which the interpreter's rows have few.
MANY: list[dict[str, Any]] = [
    {"top_k": 200, "few": 1, "mixed": True},
    {"top_p": 0.9, "few": 1, "scale": 1.0},
    {"top_k": 300, "top_p": 0.7, "few": 1, "scale": 1.0},
    {"top_k": 300, "top_p": 0.7, "penalties": True, "few": 1, "mixed": True},
]
# Ways to cut the pass over all logits: a program for the row, for a part of it, tiles ahead.
WAYS = [
    SamplingConfig(16, 4),
    SamplingConfig(32, 8, pieces=3),
    SamplingConfig(64, 8, num_stages=3),
    SamplingConfig(16, 4, 2, 2),
]
# A nested call costs the interpreter two milliseconds, and a search has many: few rows.
SMALL = (
    [case((3, 1000), FP32, **settings) for settings in SETTINGS]
    + [case((3, 1000), BF16, **settings) for settings in SETTINGS[:2] + SETTINGS[6:]]
    + [case((2, size), FP16, mixed=True, top_k=3, top_p=0.9) for size in (1, 63, 257)]
    + [case((2, 9000), BF16, **settings) for settings in [SETTINGS[1], SETTINGS[4]]]
    + [case((2, 20000), BF16, mixed=True, config=config) for config in WAYS]
    + [case((2, 1500), FP32, **settings) for settings in MANY]
)
FLAT: dict[str, Any] = {"top_p": 0.9, "scale": 1.0}
LARGE = [
    case((rows, VOCABULARY), dtype, **settings)
    for rows, dtype in [(1, FP32), (65, BF16), (300, BF16)]
    for settings in [
        *SETTINGS,
        FLAT,
        {"top_p": 0.3, "scale": 0.5},
        {"top_p": 0.95, "scale": 2.0, "peaks": 30},
        {"top_k": 5000, "top_p": 0.5},
    ]
] + [case((17000, VOCABULARY), BF16, temperature=0.0)]  # past 2^31 entries
TIMED: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.6},
    {"temperature": 0.6, "top_k": 50},
    {"temperature": 0.6, "top_p": 0.9},
    {"temperature": 0.6, "top_k": 50, "top_p": 0.9},
]
BENCH = [
    case((rows, VOCABULARY), dtype, **settings)
    for rows in (1, 64, 512)
    for dtype in (FP32, BF16)
    for settings in [
        *TIMED,
        FLAT,
        {"top_p": 0.9, "scale": 1.5, "peaks": 40},
        {"temperature": 0.6, "min_p": 0.05},
    ]
]


def search(
    logits_BV: Tensor,
    temperature_B: Tensor,
    top_k_B: Tensor | None = None,
    top_p_B: Tensor | None = None,
    min_p_B: Tensor | None = None,
    **others: Any,
) -> ConfigSearch | None:
    """The pass over all logits, timed where rows are drawn and nothing else is done."""
    filtered = not (top_k_B is None and top_p_B is None and min_p_B is None)
    if filtered or not temperature_B.all() or any(name in others for name in TABLES):
        return None
    rows, groups = logits_BV.shape[0], -(-logits_BV.shape[1] // reference.GROUP)
    configs = search_space(rows, groups, logits_BV.dtype, target_of(logits_BV))
    return ConfigSearch("sampling", tune_key(rows, groups, logits_BV.dtype), configs)


COMPILE = [
    case((2, VOCABULARY), BF16, top_k=50, top_p=0.9),
    case((2, VOCABULARY), FP32, min_p=0.1, penalties=True),
    case((2, VOCABULARY), FP32, top_p=0.9),
    case((2, VOCABULARY), BF16, config=SamplingConfig(32, 4)),
    case((2, VOCABULARY), FP32, config=SamplingConfig(32, 8, num_stages=3)),
]

OP = Op(
    name="sampling",
    summary="Greedy or seeded choice of the next tokens: penalties, top-k, top-p, min-p, Gumbel",
    **functions(define, launch, cost, eager=eager, argmax=argmax),
    **case_lists(SMALL, LARGE, BENCH, COMPILE),
    search=search,
)
