"""`ridgeline quantize`: a smaller checkpoint that other engines load too, with its quality measured
against the original. What falls outside the bound is refused, and nothing is written.
"""

from __future__ import annotations

import argparse
import os
import shutil
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ridgeline.cli.figures import divergence_figures, figure, peak_host_bytes
from ridgeline.cli.options import add_flags, from_flags
from ridgeline.cli.terminal import Terminal
from ridgeline.data.text_files import read_text
from ridgeline.engine.loading import tokenizer_of
from ridgeline.errors import OutputError, QualityError, UnsupportedError, UsageError
from ridgeline.formats.dtypes import dtype_name, parse_dtype
from ridgeline.hardware import Hardware, detect
from ridgeline.hardware.units import human_bytes
from ridgeline.ladder.quantize_job import WEIGHT, Job, Quantized, advice, harm, quantize, save
from ridgeline.models.checkpoint import open_checkpoint, resolve_model
from ridgeline.models.families import describe
from ridgeline.quality.gate import USUAL, Bounds
from ridgeline.quantization.devices import check_runs
from ridgeline.quantization.files.read import is_quantized
from ridgeline.quantization.load import choose_dtype, load_model
from ridgeline.quantization.methods import METHODS, Method, parse_sparsity, usual_method
from ridgeline.quantization.scheme import NAMES, Scheme, parse_scheme
from ridgeline.quantization.sizes import weight_bytes
from ridgeline.records import Record

EXAMPLE = """\
ridgeline quantize demo --scheme int8 --out demo-int8
ridgeline quantize ./model --scheme int4-g128 --calibration my.txt --out ./model-int4
ridgeline quantize ./model --scheme int4-g64 --auto-mixed --max-kl 0.02 --out ./model-mixed"""

NUM_SHOWN = 8  # matrices in the table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="Hugging Face folder or hub name, GGUF file, or `demo`")
    parser.add_argument("--scheme", required=True, metavar="NAME", help=f"one of {NAMES}")
    parser.add_argument(
        "--out", required=True, type=Path, metavar="DIR", help="new or empty folder"
    )
    parser.add_argument(
        "--method",
        choices=("auto", *METHODS),
        default="auto",
        help="how codes are found (default: gptq for int4, smoothquant for 8-bit inputs, and gptq "
        "behind it for fp8, else rtn)",
    )
    parser.add_argument(
        "--sparsity", metavar="WHAT", help="2:4 or a share such as 0.5, with sparsegpt or wanda"
    )
    parser.add_argument(
        "--calibration", type=Path, metavar="FILE", help="text (default: Python's own help)"
    )
    parser.add_argument(
        "--sequences",
        type=int,
        metavar="N",
        help="of 512 tokens, to calibrate on (default: 128 on a GPU, 32 on a CPU, 8 for rtn)",
    )
    parser.add_argument(
        "--text",
        type=Path,
        metavar="FILE",
        help="text to measure on (default: the end of the calibration text)",
    )
    parser.add_argument(
        "--bytes", type=int, metavar="N", help="of that text, the first N bytes alone"
    )
    parser.add_argument("--window", type=int, default=2048, metavar="N", help="tokens of a window")
    parser.add_argument(
        "--skip",
        action="append",
        default=[],
        metavar="NAME",
        help="leave projections as they are: layers.0.*, *.down (may be given several times)",
    )
    parser.add_argument(
        "--auto-mixed",
        action="store_true",
        help="leave as few as needed of the worst projections, to stay inside the bound",
    )
    parser.add_argument(
        "--work", type=Path, metavar="DIR", help="keep finished layers there, to go on after a stop"
    )
    parser.add_argument(
        "--save", type=Path, metavar="DIR", help="also write a record there, refused or not"
    )
    parser.add_argument("--dtype", default="auto", help="of what stays: fp32, bf16 or fp16")
    parser.add_argument("--device", default="auto", help="cpu, cuda or cuda:N (default: auto)")
    add_flags(parser, Bounds)


def run(args: argparse.Namespace, terminal: Terminal) -> dict[str, Any]:
    scheme = parse_scheme(args.scheme)
    method = chosen_method(args, scheme)
    for name in ("sequences", "bytes"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise UsageError(f"--{name} is {value}; give at least 1")
    if args.bytes is not None and args.text is None:
        raise UsageError("--bytes is about a text to measure on; give --text FILE")
    check_out(args.out)
    path = resolve_model(args.model)
    check_work(args.work, path)
    checkpoint = open_checkpoint(path)
    if is_quantized(checkpoint):
        raise UnsupportedError(f"{path} is quantized already; give the checkpoint it was made from")
    job = asked_job(args, scheme, method)
    begun = time.perf_counter()
    with terminal.progress() as progress:
        hardware = detect(args.device)
        config = describe(checkpoint).config
        dtype = dtype_name(choose_dtype(args.dtype, config, hardware))
        check_runs(scheme, dtype, hardware.device)
        check_room(args.out, weight_bytes(config, parse_dtype(dtype), scheme))
        tokenizer = tokenizer_of(path)
        if tokenizer is None:
            raise UnsupportedError(f"{path} has no tokenizer, which calibration text needs")
        model = load_model(path, dtype=dtype, device=hardware.device, progress=progress)
        found = quantize(model, tokenizer, job, progress)
    if found.problem is None:
        save(found, args.out, source=path, tokenizer=tokenizer)
    made = document(args, found)
    made |= {"method": method.name, "method_options": repr(method), "dtype": dtype}
    made |= {"expanded_from_gguf": checkpoint.format == "gguf"}
    made |= {"total_seconds": time.perf_counter() - begun, "peak_host_bytes": peak_host_bytes()}
    if args.save is not None:
        record = kept_record(made, hardware, found.problem)
        made["record"] = str(record.save(args.save))
    if found.problem is not None:
        raise QualityError(advice(found))
    return made


def chosen_method(args: argparse.Namespace, scheme: Scheme) -> Method:
    name = args.method
    if args.sparsity is None:
        return usual_method(scheme) if name == "auto" else METHODS[name]()
    if name == "auto" or not METHODS[name].prunes:
        raise UsageError(f"--sparsity goes with sparsegpt or wanda, not with {name}")
    return METHODS[name](parse_sparsity(args.sparsity))  # type: ignore[call-arg]


def check_out(folder: Path) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"--out {folder} is there already and not empty; name a new folder")


def check_room(folder: Path, needed: int) -> None:
    """Hours of work should not end at a full disk, or at one that may not be written to."""
    parent = next(path for path in folder.resolve().parents if path.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise OutputError(f"cannot write {folder}: {parent} takes no new folder; name another")
    free = shutil.disk_usage(parent).free
    if needed > free:
        raise OutputError(
            f"{folder} will take {human_bytes(needed)}, and {human_bytes(free)} are free there; "
            "name a folder on another disk"
        )


def check_work(folder: Path | None, model: Path) -> None:
    if folder is None:
        return
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"--work {folder} is a file; name a folder, new or of an earlier run")
    original = model if model.is_dir() else model.parent
    if folder.resolve().is_relative_to(original.resolve()):
        raise UsageError(f"--work {folder} lies in the original's folder; name another")


def asked_job(args: argparse.Namespace, scheme: Scheme, method: Method) -> Job:
    given: Bounds = from_flags(args, Bounds)
    bounds = Bounds(
        USUAL.max_kl if given.max_kl is None else given.max_kl,
        USUAL.max_ppl_increase if given.max_ppl_increase is None else given.max_ppl_increase,
    )
    return Job(
        scheme,
        method,
        calibration=None if args.calibration is None else read_text(args.calibration),
        text=None if args.text is None else read_text(args.text, args.bytes),
        num_sequences=args.sequences,
        window=args.window,
        bounds=bounds,
        skip=tuple(args.skip),
        auto_mixed=args.auto_mixed,
        work=args.work,
    )


def kept_record(made: dict[str, Any], hardware: Hardware, problem: str | None) -> Record:
    """What a model outside the bound measured is kept too, with the reason for its refusal."""
    values = {
        **divergence_figures(made["quality"]),
        **figure("num_tokens", made["quality"]["original"]["num_tokens"], "token"),
        **figure("num_quantized", made["num_quantized"], "1"),
        **figure("num_left", len(made["stays"]), "1"),
        **figure("bytes_before", made["bytes_before"], "B"),
        **figure("bytes_after", made["bytes_after"], "B"),
        **figure("quantizing_seconds", made["quantizing_seconds"], "s"),
        **figure("total_seconds", made["total_seconds"], "s"),
        **figure("peak_host_bytes", made["peak_host_bytes"], "B"),
    }
    notes = [f"against the original in {made['dtype']}; method {made['method_options']}"]
    notes += [] if problem is None else [f"refused: {problem}"]
    name = f"quantize-{Path(made['model']).stem}-{made['scheme']}-{made['method']}"
    return Record.create(name, hardware, values, notes=notes)


def document(args: argparse.Namespace, found: Quantized) -> dict[str, Any]:
    reports = {report.name.removesuffix(WEIGHT): report for report in found.reports}
    return {
        "what": "quantize",
        "model": args.model,
        "scheme": args.scheme,
        "out": str(args.out),
        "num_quantized": len(found.codes),
        "stays": list(found.stays),
        "bytes_before": sum(value.nbytes for value in found.plain.parameters()),
        "bytes_after": size_of(args.out) if found.problem is None else None,
        "quantizing_seconds": found.seconds,
        "quality": found.quality.to_json(),
        "trials": [
            {"left": left, "mean_kl": kl, "increase": increase}
            for left, kl, increase in found.trials
        ],
        "matrices": [asdict(reports[name]) for name in harm(found.reports, list(found.codes))],
    }


def size_of(path: Path) -> int:
    return sum(file.stat().st_size for file in path.glob("*.safetensors"))


def render(document: dict[str, Any], console: Console) -> None:
    quality = document["quality"]
    table = Table(title=f"{document['model']} in {document['scheme']}", title_justify="left")
    table.add_column("")
    table.add_column("before", justify="right")
    table.add_column("after", justify="right")
    before, after = (human_bytes(document[f"bytes_{when}"]) for when in ("before", "after"))
    table.add_row("weights", before, after)
    original = quality["original"]["perplexity"]["value"]
    increase = quality["perplexity_increase"]["value"]
    table.add_row("perplexity", f"{original:.3f}", f"{original * (1 + increase):.3f}")
    table.add_row("", "", f"{increase:+.2%}")
    table.add_row("mean KL, p99", "", f"{quality['mean_kl']['value']:.5f}, {quality['p99_kl']:.4f}")
    table.add_row("likeliest token differs", "", f"{quality['changed_share']['value']:.2%}")
    console.print(table)
    worst = Table(title="outputs that suffer most", title_justify="left")
    worst.add_column("projection")
    worst.add_column("error, dB", justify="right")
    for row in document["matrices"][:NUM_SHOWN]:
        error = "–" if row["error_db"] is None else f"{row['error_db']:.1f}"
        worst.add_row(row["name"].removesuffix(WEIGHT), error)
    console.print(worst)
    stays = document["stays"]
    if stays:
        console.print(f"{len(stays)} projections stay as they are: {', '.join(stays[:NUM_SHOWN])}")
    if document["expanded_from_gguf"]:
        console.print("the GGUF's blocks were expanded first")
    console.print(f"{document['num_quantized']} projections quantized; saved in {document['out']}")
