"""`ridgeline hardware`: the device's facts, and each ceiling as measured beside what the datasheet
promises.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ridgeline.cli.arguments.options import DEVICE_HELP, add_save
from ridgeline.cli.arguments.parser import group
from ridgeline.cli.terminal import Terminal
from ridgeline.errors import OutputError
from ridgeline.hardware import Hardware, detect
from ridgeline.hardware.clocks import Clocks, ClockSampler
from ridgeline.hardware.facts import DATASHEET_ONLY, MEASURED
from ridgeline.hardware.specs import DTYPES, SPECS
from ridgeline.hardware.units import human, human_bytes, percent
from ridgeline.kernels.ceilings import measure
from ridgeline.records import Record, Value

EXAMPLE = """\
ridgeline hardware
ridgeline hardware --device cuda:1 --json
ridgeline hardware --list"""

BUSY_SPREAD = 0.3
UNIT_NAMES = {"cuda": "SMs", "rocm": "CUs", "cpu": "cores"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group(parser, "device").add_argument(
        "--device", default="auto", metavar="DEVICE", help=DEVICE_HELP
    )
    group(parser, "device").add_argument(
        "--refresh", action="store_true", help="measure again instead of using cached results"
    )
    output = add_save(parser)
    output.add_argument(
        "--list", action="store_true", help="list the datasheet figures of known devices"
    )


def run(args: argparse.Namespace, terminal: Terminal) -> dict[str, Any]:
    if args.list:
        return {"datasheet": [asdict(spec) for spec in SPECS]}
    hardware = detect(args.device)
    if args.save is not None:
        make_folder(args.save)  # before minutes are spent on what could not be kept
    with terminal.progress() as progress, ClockSampler(hardware) as clocks:
        hardware = measure(hardware, progress=progress, refresh=args.refresh)
    document: dict[str, Any] = {"hardware": hardware.to_json()}
    if args.save is not None:
        document["record"] = str(as_record(hardware, clocks.median).save(args.save))
    return document


def make_folder(path: str) -> None:
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        raise OutputError(
            f"cannot write into {path!r}: {getattr(error, 'strerror', error)}"
        ) from error


def as_record(hardware: Hardware, clocks: Clocks | None = None) -> Record:
    values = {}
    for key, ceiling in hardware.ceilings.items():
        share = None if ceiling.unit == "s" else hardware.share(key)
        values[key] = Value(
            ceiling.value,
            ceiling.unit,
            spread=ceiling.spread,
            share_of_ceiling=share,
            ceiling_source=None if share is None else "datasheet",
        )
    notes = [f"{key}: {reason}" for key, reason in hardware.absent.items()]
    return Record.create("hardware", hardware, values, notes=notes, clocks=clocks)


def render(document: dict[str, Any], console: Console) -> None:
    if "datasheet" in document:
        render_list(document["datasheet"], console)
        return
    hardware = Hardware.from_json(document["hardware"])
    console.print(hardware.name, style="bold")
    console.print(header(hardware))
    console.print()
    console.print(ceilings_table(hardware))
    console.print()
    for line in reached_by(hardware):
        console.print(line, style="dim")
    console.print(sources(hardware), style="dim")
    if "record" in document:
        console.print(f"record: {document['record']}")


def header(hardware: Hardware) -> Table:
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="dim")
    facts.add_column()
    units = f"{hardware.num_units} {UNIT_NAMES[hardware.device_type]}"
    if hardware.num_threads is not None:
        units += f", {hardware.num_threads} threads"
    memory = human_bytes(hardware.memory_bytes)
    if hardware.l2_bytes is not None:
        memory += f", L2 {human_bytes(hardware.l2_bytes)}"
    if hardware.cache_bytes is not None and hardware.cache_bytes != hardware.l2_bytes:
        memory += f", last-level cache {human_bytes(hardware.cache_bytes)}"
    versions = ", ".join(f"{name} {version}" for name, version in hardware.versions.items())
    device = f"{hardware.device}, {hardware.vendor} {hardware.architecture}, {units}"
    facts.add_row("device", device)
    facts.add_row("memory", memory)
    facts.add_row("kernel" if hardware.device_type == "cpu" else "driver", hardware.driver)
    facts.add_row("versions", versions)
    return facts


def ceilings_table(hardware: Hardware) -> Table:
    table = Table(box=None, padding=(0, 1), pad_edge=False, header_style="dim")
    table.add_column("ceiling", no_wrap=True)
    for heading in ("measured", "spread", "datasheet", "share"):
        table.add_column(heading, justify="right", no_wrap=heading != "measured", max_width=28)
    for key, (label, unit) in (MEASURED | DATASHEET_ONLY).items():
        measured, promised = hardware.ceilings.get(key), hardware.datasheet.get(key)
        if key in DATASHEET_ONLY and (promised is None or key == "memory_bandwidth"):
            continue  # the memory's bandwidth already stands beside copy and read
        table.add_row(
            label,
            Text(hardware.absent.get(key, ""), style="dim")
            if measured is None
            else Text(human(measured.value, unit), style="bold"),
            percent(measured.spread) if measured else "",
            human(promised.value, unit) if promised else Text(missing(hardware, key), style="dim"),
            percent(hardware.share(key)),
        )
    return table


def missing(hardware: Hardware, key: str) -> str:
    """Launches have no datasheet figure anywhere; other gaps are not known or not applicable."""
    return "" if MEASURED[key][1] == "s" or key in hardware.absent else "unknown"


def reached_by(hardware: Hardware) -> list[str]:
    """Where something else than torch's own call was the fastest, which then is the ceiling."""
    by = {key: ceiling.by for key, ceiling in hardware.ceilings.items() if ceiling.by is not None}
    return [f"{MEASURED[key][0]}: reached by {name}" for key, name in by.items()]


def sources(hardware: Hardware) -> str:
    text = "spread: width of the middle 80% of samples over the median. "
    if any((ceiling.spread or 0) > BUSY_SPREAD for ceiling in hardware.ceilings.values()):
        text += "A large spread means a busy machine: run again with --refresh when idle. "
    if hardware.datasheet_source is None:
        return text + "datasheet: unknown for this device (--list shows the known ones)."
    return text + f"datasheet, dense: {hardware.datasheet_source}"


def render_list(rows: list[dict[str, Any]], console: Console) -> None:
    columns = {"memory_gb": "GB", "bandwidth_gb_s": "GB/s"}
    columns |= {dtype: dtype for dtype in DTYPES}
    columns |= {"link_gb_s": "link", "pcie_gb_s": "PCIe", "power_w": "W"}
    documents = list(dict.fromkeys(row["source"] for row in rows))
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim")
    table.add_column("device", no_wrap=True)
    for heading in (*columns.values(), "src"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        cells = [figure(row[key]) for key in columns]
        table.add_row(row["name"], *cells, str(documents.index(row["source"]) + 1))
    console.print(table)
    console.print(
        "Dense peaks in TFLOP/s (int8: TOP/s), fp32 accumulation; link (NVLink, xGMI) and PCIe in "
        "GB/s, both directions; – means not available.",
        style="dim",
    )
    for number, document in enumerate(documents, 1):
        console.print(f"{number:2} {document}", style="dim", soft_wrap=True)


def figure(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
