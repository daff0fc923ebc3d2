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


def document(model: str, scheme: str, out: Path, found: QuantizeResult) -> dict[str, Any]:
    reports = {report.name.removesuffix(WEIGHT): report for report in found.reports}
    dtype = dtype_name(found.plain.embed.weight.dtype)
    by_scheme: dict[str, list[Any]] = {}
    for choice in found.choices:
        by_scheme.setdefault(choice.scheme, []).append(choice)
    said = [in_words(choices, dtype) for choices in by_scheme.values()]
    return {
        "what": "quantize",
        "model": model,
        "scheme": scheme,
        "dtype": dtype,
        "out": str(out),
        "num_quantized": len(found.codes),
        "stays": list(found.stays),
        "bytes_before": sum(value.nbytes for value in found.plain.parameters()),
        "bytes_after": size_of(out) if found.problem is None else None,
        "weight_bytes": found.weight_bytes,
        "plain_expert_bytes": expert_bytes(found.plain.config, found.plain.embed.weight.dtype),
        "quantizing_seconds": found.seconds,
        "quantizing_device_bytes": found.device_bytes,
        "quality": found.quality.to_json(),
        "trials": [asdict(trial) for trial in found.trials],
        "speed": [choice.to_json() for choice in found.choices],
        "plain_for_speed": [words for words in said if words],
        "stays_for_speed": stays_for_speed(found),
        "projections": [asdict(place) for place in found.places],
        "kv": kv_json(found),
        "matrices": [asdict(reports[name]) for name in harm(found.reports, list(found.codes))],
    }


def stays_for_speed(found: QuantizeResult) -> list[str]:
    """Projections that no measured scheme suits: each is slower there."""
    shapes: dict[MatrixSize, list[bool]] = {}
    for choice in found.choices:
        if choice.times:
            shape = MatrixSize(choice.num_outputs, choice.depth)
            shapes.setdefault(shape, []).append(choice.quantize)
    slow = [shape for shape, faster in shapes.items() if not any(faster)]
    layers = quantizable(found.plain)
    return [name for name in found.stays if MatrixSize(*layers[name].weight.shape) in slow]


def kv_json(found: QuantizeResult) -> dict[str, Any] | None:
    if found.kv is None:
        return None
    worst = {"keys_db": max(found.kv.keys_db), "values_db": max(found.kv.values_db)}
    return {"dtype": dtype_name(found.kv.dtype), **worst}


def size_of(path: Path) -> int:
    return sum(file.stat().st_size for file in path.glob("*.safetensors"))


def render(document: Mapping[str, Any], console: Console) -> None:
    console.print(quality_table(document))
    if document["projections"]:
        places = [ProjectionResult(**row) for row in document["projections"]]
        console.print(mixture_table(places, document["dtype"]))
    console.print(worst_table(document))
    for words in document["plain_for_speed"]:
        console.print(words)
    stays = document["stays"]
    if stays and not document["projections"]:
        console.print(f"{len(stays)} projections stay as they are: {', '.join(stays[:NUM_SHOWN])}")
    kv = document["kv"]
    if kv is not None:
        errors = f"{kv['keys_db']:.0f} and {kv['values_db']:.0f} dB at worst"
        console.print(
            f"keys and values in {kv['dtype']}; the scales in the files round to {errors}"
        )
    if document["head"] != "plain":
        console.print(f"head {document['head']} by the recipe beside it; measured so")
    if document["plain_expert_bytes"]:
        experts = human_bytes(document["plain_expert_bytes"])
        console.print(f"{experts} stay in {document['dtype']}: they are experts")
    if document["original_on"] == "host":
        console.print("the original lay on the host; its blocks went to the device one by one")
    if document["expanded_from_gguf"]:
        console.print("the GGUF's blocks were expanded first")
    console.print(f"{document['num_quantized']} projections quantized; saved in {document['out']}")


def quality_table(document: Mapping[str, Any]) -> Table:
    quality = document["quality"]
    table = Table(title=f"{document['model']} in {document['scheme']}", title_justify="left")
    table.add_column("")
    table.add_column("before", justify="right")
    table.add_column("after", justify="right")
    before, files, held = (
        human_bytes(document[name]) for name in ("bytes_before", "bytes_after", "weight_bytes")
    )
    table.add_row("weights, in memory", before, held)
    table.add_row("weights, in files", "", files)
    original = quality["original"]["perplexity"]["value"]
    increase = quality["perplexity_increase"]["value"]
    table.add_row("perplexity", f"{original:.3f}", f"{original * (1 + increase):.3f}")
    table.add_row("", "", f"{increase:+.2%}")
    table.add_row("mean KL, p99", "", f"{quality['mean_kl']['value']:.5f}, {quality['p99_kl']:.4f}")
    table.add_row("likeliest token differs", "", f"{quality['changed_share']['value']:.2%}")
    return table


def worst_table(document: Mapping[str, Any]) -> Table:
    table = Table(title="outputs that suffer most", title_justify="left")
    table.add_column("projection")
    table.add_column("error, dB", justify="right")
    for row in document["matrices"][:NUM_SHOWN]:
        error = "–" if row["error_db"] is None else f"{row['error_db']:.1f}"
        table.add_row(row["name"].removesuffix(WEIGHT), error)
    return table


def mixture_table(places: Sequence[ProjectionResult], dtype: str) -> Table:
    """A row for all projections of one kind that became the same."""
    table = Table(title="what became of the projections", title_justify="left")
    for name, justify in (("projection", "left"), ("now", "left"), ("layers", "left")):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    table.add_column("size", justify="right")
    table.add_column("why no smaller")
    groups: dict[tuple[str, str | None], list[ProjectionResult]] = {}
    for place in places:
        groups.setdefault((kind_of(place.name), place.scheme), []).append(place)
    for (kind, scheme), members in sorted(groups.items(), key=lambda group: group[0][0]):
        size = human_bytes(sum(place.num_bytes for place in members))
        layers = ranges(int(place.name.split(".")[1]) for place in members)
        least = members[0].why if len({place.why for place in members}) == 1 else why_of(members)
        table.add_row(kind, scheme or dtype, layers, size, least)
    return table


def why_of(members: Sequence[ProjectionResult]) -> str:
    """Of several reasons the first, which stands for its like."""
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
