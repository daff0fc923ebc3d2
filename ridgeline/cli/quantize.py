"""`ridgeline quantize`: a smaller checkpoint that other engines load too, with its quality measured
against the original. What falls outside the bound is refused, and nothing is written. What people
see of the result is quantize_table.py's.
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from ridgeline.cli.arguments.options import add_flags, add_model, add_save, from_flags
from ridgeline.cli.arguments.parser import group
from ridgeline.cli.tables.figures import divergence_figures, figure, peak_host_bytes
from ridgeline.cli.tables.quantize import document, recovery_words, render
from ridgeline.cli.terminal import Terminal
from ridgeline.data.judged_text import JUDGED_WINDOW
from ridgeline.data.text_files import read_text
from ridgeline.engine.loading.layer_speed import usual_batches
from ridgeline.engine.loading.saved import tokenizer_of
from ridgeline.errors import OutputError, QualityError, UnsupportedError, UsageError
from ridgeline.formats.dtypes import dtype_name, parse_dtype
from ridgeline.hardware import Hardware, detect
from ridgeline.hardware.clocks import Clocks, ClockSampler
from ridgeline.hardware.detection import peak_device_bytes
from ridgeline.hardware.units import human_bytes, parse_bytes
from ridgeline.ladder.quantizing.auto import NO_CHOICE, Auto, quantize_auto, usual_schemes
from ridgeline.ladder.quantizing.file_sizes import (
    FileSize,
    expected_bytes,
    files_of,
    larger_in_words,
)
from ridgeline.ladder.quantizing.original_device import LARGE_BYTES, OriginalDevice, is_walked
from ridgeline.ladder.quantizing.quantize_job import WINDOW, QuantizeJob, advice, quantize, save
from ridgeline.ladder.quantizing.recovery import RecoveryOptions
from ridgeline.models import ModelConfig
from ridgeline.models.checkpoint import open_checkpoint, resolve_model
from ridgeline.models.families import describe
from ridgeline.quality.gate import USUAL, QualityBounds
from ridgeline.quantization.devices import check_runs
from ridgeline.quantization.files.plain import plain_storage
from ridgeline.quantization.files.read import is_quantized
from ridgeline.quantization.load import choose_dtype, load_model
from ridgeline.quantization.methods import (
    METHODS,
    Gptq,
    Method,
    SmoothQuant,
    parse_sparsity,
    usual_method,
)
from ridgeline.quantization.scheme import NAMES, Scheme, parse_scheme
from ridgeline.recipe import Head
from ridgeline.records import Record

log = logging.getLogger(__name__)

EXAMPLE = """\
ridgeline quantize demo --scheme int8 --out demo-int8
ridgeline quantize ./model --scheme int4-g128 --out ./model-int4
ridgeline quantize ./model --auto --memory 4GiB --out ./model-auto"""
MAIN_FLAGS = (
    "--device", "--out", "--scheme", "--kv", "--auto", "--memory", "--auto-mixed", "--method",
    "--calibration", "--max-kl", "--max-ppl-increase", "--text", "--save",
)  # fmt: skip

__all__ = ["EXAMPLE", "MAIN_FLAGS", "add_arguments", "render", "run"]

KV_DTYPES: dict[str | None, Literal["fp8", "int8"]] = {"kv-fp8": "fp8", "kv-int8": "int8"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    group(parser, "model").add_argument(
        "--dtype",
        default="auto",
        help="dtype of what is not quantized: fp32, bf16 or fp16 (auto: saved in bf16, or in "
        "fp16 if the original is, except tensors that the original keeps in fp32 for exactness)",
    )
    output = group(parser, "output")
    output.add_argument(
        "--out", required=True, type=Path, metavar="DIR", help="new or empty folder"
    )
    add_scheme_arguments(parser)
    add_mixture_arguments(parser)
    add_method_arguments(parser)
    add_flags(parser, QualityBounds)
    add_flags(parser, RecoveryOptions)
    add_quality_arguments(parser)
    add_save(parser)


def add_scheme_arguments(parser: argparse.ArgumentParser) -> None:
    scheme = group(parser, "scheme")
    scheme.add_argument("--scheme", metavar="NAME", help=f"one of {NAMES}")
    scheme.add_argument(
        "--kv",
        choices=("kv-fp8", "kv-int8"),
        help="also store the KV cache in 8 bits, with calibrated scales",
    )
    scheme.add_argument(
        "--head",
        choices=get_args(Head),
        default="plain",
        help="int8: measure with an int8 output head and save a recipe that uses one; the head in "
        "the checkpoint is not changed (default: %(default)s)",
    )
    scheme.add_argument(
        "--skip",
        action="append",
        default=[],
        metavar="NAME",
        help="do not quantize these projections, e.g. layers.0.*, *.down (repeat for several)",
    )
    scheme.add_argument(
        "--batch-sizes",
        metavar="N,N",
        help="do not quantize projections that get slower at one of these batch sizes here; "
        "none: do not measure (default: 1,16 on a GPU, 1 on a CPU)",
    )


def add_mixture_arguments(parser: argparse.ArgumentParser) -> None:
    mixture = group(parser, "mixture of schemes")
    mixture.add_argument(
        "--auto",
        action="store_true",
        help="instead of --scheme: find the smallest mixture within the quality bounds",
    )
    mixture.add_argument(
        "--memory", metavar="SIZE", help="with --auto: limit on the size of all weights, e.g. 4GiB"
    )
    mixture.add_argument(
        "--schemes",
        metavar="NAMES",
        help="with --auto: schemes to choose from (default: int4 with groups of 128, 64 or 32, "
        "and fp8, or int8 without fp8 hardware)",
    )
    mixture.add_argument(
        "--auto-mixed",
        action="store_true",
        help="with --scheme: leave out as few projections as the quality bounds require",
    )


def add_method_arguments(parser: argparse.ArgumentParser) -> None:
    method = group(parser, "method")
    method.add_argument(
        "--method",
        choices=("auto", *METHODS),
        metavar="NAME",
        default="auto",
        help=f"auto, {', '.join(METHODS)} (auto: gptq for int4 and --auto, smoothquant for 8-bit "
        "inputs, rtn otherwise)",
    )
    method.add_argument(
        "--sparsity", metavar="WHAT", help="2:4 or a share, e.g. 0.5; with sparsegpt or wanda"
    )
    method.add_argument(
        "--calibration", type=Path, metavar="FILE", help="calibration text (default: Python's help)"
    )
    method.add_argument(
        "--sequences",
        type=int,
        metavar="N",
        help="calibrate on N x 512 tokens (default: 128 on a GPU, 32 on a CPU, 8 for rtn)",
    )
    method.add_argument(
        "--work",
        type=Path,
        metavar="DIR",
        help="keep finished layers in DIR, to resume after a stop",
    )
    method.add_argument(
        "--original",
        choices=get_args(OriginalDevice),
        default="auto",
        help="where the original model is kept; host: one block at a time goes to the device "
        f"(auto: host if it exceeds {human_bytes(LARGE_BYTES)} or does not fit)",
    )


def add_quality_arguments(parser: argparse.ArgumentParser) -> None:
    quality = group(parser, "quality")
    quality.add_argument(
        "--text",
        type=Path,
        metavar="FILE",
        help="text to measure on (default: a built-in one, unlike the calibration text)",
    )
    quality.add_argument("--bytes", type=int, metavar="N", help="use only the text's first N bytes")
    quality.add_argument(
        "--window",
        type=int,
        metavar="N",
        help=f"tokens per window (default: {WINDOW}; {JUDGED_WINDOW} of the built-in text)",
    )


def run(args: argparse.Namespace, terminal: Terminal) -> dict[str, Any]:
    check(args)
    check_out(args.out)
    schemes = asked_schemes(args)
    memory = None if args.memory is None else parse_bytes(args.memory)
    path = resolve_model(args.model)
    check_work(args.work, path)
    checkpoint = open_checkpoint(path)
    if is_quantized(checkpoint):
        raise UnsupportedError(f"{path} is already quantized; give the original checkpoint")
    begun = time.perf_counter()
    with terminal.progress() as progress:
        hardware = detect(args.device)
        description = describe(checkpoint)
        config = description.config
        dtype = dtype_name(choose_dtype(args.dtype, config, hardware))
        schemes = schemes or usual_schemes(dtype, hardware.device)
        for scheme in schemes:
            check_runs(scheme, dtype, hardware.device)
        walked = is_walked(
            args.original,
            config,
            parse_dtype(dtype),
            schemes,
            hardware.device,
            often=args.auto or args.auto_mixed,
        )
        job = replace(asked_job(args, schemes, hardware.device), walked=walked)
        if walked and job.recovery.minutes is not None:
            raise UsageError("--recover needs the original on the device; it does not fit there")
        if walked and job.scheme is None:
            raise UsageError(NO_CHOICE)
        storage = plain_storage(checkpoint, description, args.dtype)
        job, before = replace(job, storage=storage), files_of(checkpoint)
        check_size(args.out, before, config, schemes, storage.usual(parse_dtype(dtype)))
        tokenizer = tokenizer_of(path)
        if tokenizer is None:
            raise UnsupportedError(f"{path} has no tokenizer, which calibration needs")
        device = "cpu" if walked else hardware.device
        model = load_model(path, dtype=dtype, device=device, progress=progress)
        with ClockSampler(hardware) as clocks:
            if args.auto or args.auto_mixed:
                result = quantize_auto(model, tokenizer, job, Auto(schemes, memory), progress)
            else:
                result = quantize(model, tokenizer, job, progress)
    if result.problem is None:
        save(result, args.out, source=path, tokenizer=tokenizer, head=job.head)
    named = args.scheme or " and ".join(dict.fromkeys(s.name for _, s in result.codes.values()))
    made = document(args.model, named, args.out, result, before)
    made |= {"calibration": None if args.calibration is None else str(args.calibration)}
    made |= {"text": None if args.text is None else str(args.text)}
    made |= {"method": job.method.name, "method_options": repr(job.method)}
    made |= {"head": job.head}
    made |= {"expanded_from_gguf": checkpoint.format == "gguf"}
    made |= {"original_on": "host" if walked else "device"}
    made |= {"total_seconds": time.perf_counter() - begun, "peak_host_bytes": peak_host_bytes()}
    made |= {"peak_device_bytes": peak_device_bytes(hardware.device)}
    if args.save is not None:
        label = "auto" if args.auto else f"{named}-mixed" if args.auto_mixed else named
        record = kept_record(made, hardware, result.problem, label, clocks.median)
        made["record"] = str(record.save(args.save))
    if result.problem is not None:
        trained = "" if made["recovery"] is None else f"; {recovery_words(made)}"
        raise QualityError(advice(result) + trained)
    return made


def check(args: argparse.Namespace) -> None:
    if (args.scheme is None) != args.auto:
        raise UsageError("give either --scheme (one scheme) or --auto (a mixture)")
    for name in ("schemes", "memory"):
        if getattr(args, name) is not None and not args.auto:
            raise UsageError(f"--{name} needs --auto")
    if args.auto and args.auto_mixed:
        raise UsageError("--auto already leaves out projections where needed; remove --auto-mixed")
    for name in ("sequences", "bytes"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise UsageError(f"--{name} is {value}; give at least 1")
    if args.recover is not None and (args.auto or args.auto_mixed):
        raise UsageError("--recover trains the codes of one scheme; give --scheme alone")
    if args.recover is not None and parse_scheme(args.scheme).inputs != "16-bit":
        raise UsageError(f"--recover trains weights, and {args.scheme} rounds inputs too; use int4")
    if args.recover is not None and args.sparsity is not None:
        raise UsageError("--recover trains codes; after pruning use ridgeline train --sparsity")


def asked_schemes(args: argparse.Namespace) -> tuple[Scheme, ...]:
    """None for those that are usual on the device."""
    if args.scheme is not None:
        return (parse_scheme(args.scheme),)
    names = () if args.schemes is None else dict.fromkeys(args.schemes.split(","))
    return tuple(parse_scheme(name.strip()) for name in names)


def asked_batches(text: str | None, device: str) -> tuple[int, ...]:
    if text is None:
        return usual_batches(device)
    if text == "none":
        return ()
    try:
        sizes = tuple(int(word) for word in text.split(","))
    except ValueError:
        sizes = ()
    if not sizes or min(sizes) < 1:
        raise UsageError(f"--batch-sizes is {text!r}; give positive numbers, e.g. 1,16, or none")
    return sizes


def chosen_method(args: argparse.Namespace, schemes: Sequence[Scheme]) -> Method:
    name = args.method
    if args.sparsity is not None:
        if name == "auto" or not METHODS[name].prunes:
            raise UsageError(f"--sparsity needs --method sparsegpt or wanda, not {name}")
        return METHODS[name](parse_sparsity(args.sparsity))  # type: ignore[call-arg]
    if name != "auto":
        return METHODS[name]()
    if args.auto:
        rounds_inputs = any(scheme.inputs != "16-bit" for scheme in schemes)
        return SmoothQuant(then=Gptq()) if rounds_inputs else Gptq()
    return usual_method(schemes[0])


def check_out(folder: Path) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"--out {folder} already exists and is not empty; give a new folder")


def check_size(
    folder: Path,
    before: FileSize,
    config: ModelConfig,
    schemes: Sequence[Scheme],
    stored: torch.dtype,
) -> None:
    """That the smallest result has room on the disk; and where it will be larger than the original,
    a warning before hours of work.
    """
    sizes = {scheme.name: expected_bytes(config, stored, scheme) for scheme in schemes}
    smallest = min(sizes, key=lambda name: sizes[name])
    check_room(folder, sizes[smallest])
    larger = larger_in_words(smallest, sizes[smallest], before, config, stored)
    if larger is not None:
        log.warning("%s", larger)


def check_room(folder: Path, needed: int) -> None:
    """Hours of work should not end at a full disk, or at one that may not be written to."""
    parent = next(path for path in folder.resolve().parents if path.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise OutputError(f"cannot write {folder}: {parent} is not writable; give another folder")
    free = shutil.disk_usage(parent).free
    if needed > free:
        raise OutputError(
            f"{folder} needs {human_bytes(needed)}, and only {human_bytes(free)} are free; "
            "give a folder on another disk"
        )


def check_work(folder: Path | None, model: Path) -> None:
    if folder is None:
        return
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"--work {folder} is a file; give a folder, new or from an earlier run")
    original = model if model.is_dir() else model.parent
    if folder.resolve().is_relative_to(original.resolve()):
        raise UsageError(f"--work {folder} is inside the model's folder; give another folder")


def asked_job(args: argparse.Namespace, schemes: Sequence[Scheme], device: str) -> QuantizeJob:
    given: QualityBounds = from_flags(args, QualityBounds)
    bounds = given.filled_from(USUAL)
    return QuantizeJob(
        None if args.auto or args.auto_mixed else schemes[0],
        chosen_method(args, schemes),
        calibration=None if args.calibration is None else read_text(args.calibration),
        text=None if args.text is None else read_text(args.text, args.bytes),
        built_in_bytes=args.bytes,
        num_sequences=args.sequences,
        window=args.window,
        bounds=bounds,
        skip=tuple(args.skip),
        batch_sizes=asked_batches(args.batch_sizes, device),
        head=args.head,
        kv=KV_DTYPES.get(args.kv),
        work=args.work,
        device=device,
        recovery=from_flags(args, RecoveryOptions),
    )


def kept_record(
    made: dict[str, Any],
    hardware: Hardware,
    problem: str | None,
    scheme: str,
    clocks: Clocks | None = None,
) -> Record:
    """What a model outside the bound measured is kept too, with the reason for its refusal."""
    values = {
        **divergence_figures(made["quality"]),
        **figure("num_tokens", made["quality"]["original"]["num_tokens"], "token"),
        **figure("num_quantized", made["num_quantized"], "1"),
        **figure("num_left", len(made["stays"]), "1"),
        **figure("file_bytes_before", made["file_bytes_before"], "B"),
        **figure("file_bytes_after", made["file_bytes_after"], "B"),
        **figure("weight_bytes_before", made["weight_bytes_before"], "B"),
        **figure("weight_bytes_after", made["weight_bytes_after"], "B"),
        **figure("num_trials", len(made["trials"]), "1"),
        **figure("quantizing_seconds", made["quantizing_seconds"], "s"),
        **figure("quantizing_device_bytes", made["quantizing_device_bytes"], "B"),
        **figure("total_seconds", made["total_seconds"], "s"),
        **figure("peak_host_bytes", made["peak_host_bytes"], "B"),
        **figure("peak_device_bytes", made["peak_device_bytes"], "B"),
    }
    notes = [f"against the original in {made['dtype']}; method {made['method_options']}"]
    notes += ["the original block by block, from the host"] * (made["original_on"] == "host")
    notes += [] if problem is None else [f"refused: {problem}"]
    name = f"quantize-{Path(made['model']).stem}-{scheme}-{made['method']}"
    return Record.create(name, hardware, values, notes=notes, clocks=clocks)
