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
from ridgeline.ladder.quantizing.file_sizes import FileSize, larger_in_words
from ridgeline.ladder.quantizing.quantize_job import WEIGHT, ProjectionResult, QuantizeResult, harm
from ridgeline.models.checkpoint.base import shorten
from ridgeline.quantization.choose import in_words
from ridgeline.quantization.linear import quantizable
from ridgeline.quantization.sizes import MatrixSize, expert_bytes

NUM_SHOWN = 8  # matrices in the table
HELP = "Python's help"


def document(
    model: str, scheme: str, out: Path, result: QuantizeResult, before: FileSize
) -> dict[str, Any]:
    reports = {report.name.removesuffix(WEIGHT): report for report in result.reports}
    dtype = dtype_name(result.plain.embed.weight.dtype)
    by_scheme: dict[str, list[Any]] = {}
    for choice in result.choices:
        by_scheme.setdefault(choice.scheme, []).append(choice)
    sentences = [in_words(choices, dtype) for choices in by_scheme.values()]
    stored = result.storage.usual(result.plain.embed.weight.dtype)
    after = size_of(out) if result.problem is None else None
    config = result.plain.config
    return {
        "what": "quantize",
        "model": model,
        "scheme": scheme,
        "dtype": dtype,
        "out": str(out),
        "num_quantized": len(result.codes),
        "stays": list(result.stays),
        "file_bytes_before": before.num_bytes,
        "file_bytes_after": after,
        "larger": None if after is None else larger_in_words(scheme, after, before, config, stored),
        "stored_dtype": dtype_name(stored),
        "stored_exactly": result.storage.kept(result.plain, result.codes),
        "weight_bytes_before": sum(value.nbytes for value in result.plain.parameters()),
        "weight_bytes_after": result.weight_bytes,
        "plain_expert_bytes": expert_bytes(config, result.plain.embed.weight.dtype),
        "fit": None if result.fit is None or not result.fit.unfit else result.fit.to_json(),
        "quantizing_seconds": result.seconds,
        "quantizing_device_bytes": result.device_bytes,
        "quality": result.quality.to_json(),
        "verdict": result.verdict,
        "trials": [asdict(trial) for trial in result.trials],
        "speed": [choice.to_json() for choice in result.choices],
        "plain_for_speed": [words for words in sentences if words],
        "stays_for_speed": stays_for_speed(result),
        "projections": [asdict(place) for place in result.places],
        "kv": kv_json(result),
        "recovery": recovery_json(result),
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


def recovery_json(result: QuantizeResult) -> dict[str, Any] | None:
    if result.recovery is None or result.before_recovery is None:
        return None
    return {**asdict(result.recovery), "before": result.before_recovery.to_json()}


def recovery_words(document: Mapping[str, Any]) -> str:
    """`perplexity +19.1% (18.0 to 20.2%) before, +5.8% (5.1 to 6.5%) after 480 steps …`."""
    made = document["recovery"]
    before, after = (
        percent_words(each["perplexity_increase"]) for each in (made["before"], document["quality"])
    )
    return (
        f"recovery: perplexity {before} before, {after} after {made['steps']:,} steps of "
        f"{made['tokens']:,} tokens in {made['seconds']:.0f} s"
    )


def percent_words(interval: Mapping[str, float | None]) -> str:
    value, low, high = (interval[name] for name in ("value", "low", "high"))
    assert value is not None
    if low is None or high is None:
        return f"{value:+.2%}"
    return f"{value:+.2%} ({100 * low:+.2f} to {high:+.2%})"


def size_of(path: Path) -> int:
    return sum(file.stat().st_size for file in path.glob("*.safetensors"))


def render(document: Mapping[str, Any], console: Console) -> None:
    console.print(quality_table(document))
    console.print(document["verdict"], style="green", markup=False)
    console.print(measured_on(document), markup=False)
    if document.get("recovery") is not None:
        console.print(recovery_words(document), markup=False)
    if document["larger"] is not None:
        console.print(document["larger"], style="bold", markup=False)
    if document["projections"]:
        projections = [ProjectionResult(**row) for row in document["projections"]]
        console.print(mixture_table(projections, document["dtype"]))
    console.print(worst_table(document))
    for words in document["plain_for_speed"]:
        console.print(words)
    fit = document["fit"]
    if fit is not None:
        console.print(fit["message"], style="bold", markup=False)
    unfit = () if fit is None else fit["unfit"]
    stays = [name for name in document["stays"] if name not in unfit]
    if stays and not document["projections"]:
        others = "other " if unfit else ""
        names = ", ".join(stays[:NUM_SHOWN])
        console.print(f"{len(stays)} {others}projections not quantized: {names}")
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
    console.print(stored_as(document), markup=False)
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
    numbers = ("before", "after", "change", "95% interval")
    table = plain_table(title, "", *numbers, numbers=numbers)
    for label, name in (("files", "file_bytes"), ("memory", "weight_bytes")):
        size, now = document[f"{name}_before"], document[f"{name}_after"]
        change = f"{now / size - 1:+.0%}"
        table.add_row(f"weights in {label}", human_bytes(size), human_bytes(now), change)
    original = quality["original"]["perplexity"]["value"]
    increase = quality["perplexity_increase"]
    after = f"{original * (1 + increase['value']):.3f}"
    change = f"{increase['value']:+.2%}"
    table.add_row("perplexity", f"{original:.3f}", after, change, interval(increase, "{:+.2%}"))
    kl, changed = quality["mean_kl"], quality["changed_share"]
    table.add_row("mean KL divergence", "", f"{kl['value']:.5f}", "", interval(kl, "{:.5f}"))
    table.add_row("p99 KL divergence", "", f"{quality['p99_kl']:.4f}")
    share = f"{changed['value']:.2%}"
    table.add_row("likeliest token differs", "", share, "", interval(changed, "{:.2%}"))
    return table


def interval(figure: Mapping[str, float | None], form: str) -> str:
    if figure["low"] is None:
        return "–"
    return f"{form.format(figure['low'])} to {form.format(figure['high'])}"


def measured_on(document: Mapping[str, Any]) -> str:
    text, calibration = document["text"], document["calibration"]
    original = document["quality"]["original"]
    tokens, windows = original["num_tokens"], original["num_windows"]
    return (
        f"measured on {text or 'the built-in text'} ({tokens} tokens in {windows} windows); "
        f"calibrated on {calibration or HELP}"
    )


def stored_as(document: Mapping[str, Any]) -> str:
    """What weights without codes are in the files, and which are more exact."""
    words = f"weights that are not quantized are saved in {document['stored_dtype']}"
    exact = document["stored_exactly"]
    if not exact:
        return words
    return f"{words}; in {document['dtype']} as in the original, which is exact: {shorten(exact)}"


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
