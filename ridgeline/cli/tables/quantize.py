"""The result of `ridgeline quantize`, as a document for programs and as tables for people: sizes
and quality, what each group of projections became and why, what stayed for its speed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ridgeline.formats.dtypes import dtype_name
from ridgeline.hardware.units import human_bytes
from ridgeline.ladder.quantizing.quantize_job import WEIGHT, ProjectionResult, QuantizeResult, harm
from ridgeline.quantization.choose import in_words
from ridgeline.quantization.linear import quantizable
from ridgeline.quantization.sizes import MatrixSize, expert_bytes

NUM_SHOWN = 8  # matrices in the table


def document(model: str, scheme: str, out: Path, result: QuantizeResult) -> dict[str, Any]:
    reports = {report.name.removesuffix(WEIGHT): report for report in result.reports}
    dtype = dtype_name(result.plain.embed.weight.dtype)
    by_scheme: dict[str, list[Any]] = {}
    for choice in result.choices:
        by_scheme.setdefault(choice.scheme, []).append(choice)
    sentences = [in_words(choices, dtype) for choices in by_scheme.values()]
    return {
        "what": "quantize",
        "model": model,
        "scheme": scheme,
        "dtype": dtype,
        "out": str(out),
        "num_quantized": len(result.codes),
        "stays": list(result.stays),
        "bytes_before": sum(value.nbytes for value in result.plain.parameters()),
        "bytes_after": size_of(out) if result.problem is None else None,
        "weight_bytes": result.weight_bytes,
        "plain_expert_bytes": expert_bytes(result.plain.config, result.plain.embed.weight.dtype),
        "quantizing_seconds": result.seconds,
        "quantizing_device_bytes": result.device_bytes,
        "quality": result.quality.to_json(),
        "trials": [asdict(trial) for trial in result.trials],
        "speed": [choice.to_json() for choice in result.choices],
        "plain_for_speed": [words for words in sentences if words],
        "stays_for_speed": stays_for_speed(result),
        "projections": [asdict(place) for place in result.places],
        "kv": kv_json(result),
        "matrices": [asdict(reports[name]) for name in harm(result.reports, list(result.codes))],
    }


def stays_for_speed(result: QuantizeResult) -> list[str]:
    """Projections that are slower in every measured scheme."""
    shapes: dict[MatrixSize, list[bool]] = {}
    for choice in result.choices:
        if choice.times:
            shape = MatrixSize(choice.num_outputs, choice.depth)
            shapes.setdefault(shape, []).append(choice.quantize)
    slow = [shape for shape, faster in shapes.items() if not any(faster)]
    layers = quantizable(result.plain)
    return [name for name in result.stays if MatrixSize(*layers[name].weight.shape) in slow]


def kv_json(result: QuantizeResult) -> dict[str, Any] | None:
    if result.kv is None:
        return None
    worst = {"keys_db": max(result.kv.keys_db), "values_db": max(result.kv.values_db)}
    return {"dtype": dtype_name(result.kv.dtype), **worst}


def size_of(path: Path) -> int:
    return sum(file.stat().st_size for file in path.glob("*.safetensors"))


def render(document: Mapping[str, Any], console: Console) -> None:
    console.print(quality_table(document))
    if document["projections"]:
        projections = [ProjectionResult(**row) for row in document["projections"]]
        console.print(mixture_table(projections, document["dtype"]))
    console.print(worst_table(document))
    for words in document["plain_for_speed"]:
        console.print(words)
    stays = document["stays"]
    if stays and not document["projections"]:
        console.print(f"{len(stays)} projections not quantized: {', '.join(stays[:NUM_SHOWN])}")
    kv = document["kv"]
    if kv is not None:
        errors = f"{kv['keys_db']:.0f} and {kv['values_db']:.0f} dB at worst"
        console.print(f"KV cache in {kv['dtype']}: keys and values rounded to {errors}")
    if document["head"] != "plain":
        console.print(
            f"output head in {document['head']} (set in recipe.json), included in the measurement"
        )
    if document["plain_expert_bytes"]:
        experts = human_bytes(document["plain_expert_bytes"])
        console.print(f"experts are not quantized: {experts} in {document['dtype']}")
    if document["original_on"] == "host":
        console.print("the original was kept in host memory and moved to the device block by block")
    if document["expanded_from_gguf"]:
        console.print("the GGUF weights were dequantized first")
    console.print(f"{document['num_quantized']} projections quantized; saved in {document['out']}")


def plain_table(title: str, *columns: str, numbers: Sequence[str] = ()) -> Table:
    table = Table(
        title=title, title_justify="left", title_style="bold",
        box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0),
    )  # fmt: skip
    for name in columns:
        table.add_column(name, justify="right" if name in numbers else "left", overflow="fold")
    return table


def quality_table(document: Mapping[str, Any]) -> Table:
    quality = document["quality"]
    title = f"{document['model']} in {document['scheme']}"
    table = plain_table(
        title, "", "before", "after", "change", numbers=("before", "after", "change")
    )
    before, files, held = (
        human_bytes(document[name]) for name in ("bytes_before", "bytes_after", "weight_bytes")
    )
    table.add_row("weights in memory", before, held)
    table.add_row("weights on disk", "", files)
    original = quality["original"]["perplexity"]["value"]
    increase = quality["perplexity_increase"]["value"]
    after = f"{original * (1 + increase):.3f}"
    table.add_row("perplexity", f"{original:.3f}", after, f"{increase:+.2%}")
    table.add_row("mean KL divergence", "", f"{quality['mean_kl']['value']:.5f}")
    table.add_row("p99 KL divergence", "", f"{quality['p99_kl']:.4f}")
    table.add_row("likeliest token differs", "", f"{quality['changed_share']['value']:.2%}")
    return table


def worst_table(document: Mapping[str, Any]) -> Table:
    table = plain_table("largest errors", "projection", "error, dB", numbers=("error, dB",))
    for row in document["matrices"][:NUM_SHOWN]:
        error = "–" if row["error_db"] is None else f"{row['error_db']:.1f}"
        table.add_row(row["name"].removesuffix(WEIGHT), error)
    return table


def mixture_table(projections: Sequence[ProjectionResult], dtype: str) -> Table:
    """A row for all projections of one kind that became the same."""
    columns = ("projection", "now", "layers", "size", "why not smaller")
    table = plain_table("projections", *columns, numbers=("size",))
    groups: dict[tuple[str, str | None], list[ProjectionResult]] = {}
    for each in projections:
        groups.setdefault((kind_of(each.name), each.scheme), []).append(each)
    for (kind, scheme), members in sorted(groups.items(), key=lambda group: group[0][0]):
        size = human_bytes(sum(each.num_bytes for each in members))
        layers = ranges(int(each.name.split(".")[1]) for each in members)
        why = members[0].why if len({each.why for each in members}) == 1 else why_of(members)
        table.add_row(kind, scheme or dtype, layers, size, why)
    return table


def why_of(members: Sequence[ProjectionResult]) -> str:
    """The first of several reasons, with its layer."""
    return f"{members[0].why} (layer {members[0].name.split('.')[1]})"


def kind_of(name: str) -> str:
    """`mlp.down` of `layers.3.mlp.down`."""
    return ".".join(name.split(".")[2:])


def ranges(numbers: Iterable[int]) -> str:
    """`0-3, 7`."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][-1] == number - 1:
            runs[-1] = [runs[-1][0], number]
        else:
            runs.append([number])
    return ", ".join("-".join(map(str, run)) for run in runs)
