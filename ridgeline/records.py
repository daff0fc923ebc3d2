"""`Record`: the one schema for anything measured. Tables, JSON, plots and reports are all drawn
from records.

A record holds values with their spread and the share of the ceiling they reached, and enough to
repeat the run: the command as typed, commit, device, driver and library versions, clocks and power
where the vendor's tool reports them.

    record = Record.create("hardware", hardware, {"copy": Value(4.25e12, "B/s", spread=0.01)})
    path = record.save("results")      # results/hardware-nvidia-h200-2026-11-15.json
"""

from __future__ import annotations

import json
import platform
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from ridgeline.errors import UsageError
from ridgeline.formats.files import atomic_write, reject_unknown_keys
from ridgeline.hardware import Hardware
from ridgeline.hardware.clocks import Clocks, read_clocks
from ridgeline.version import __version__

SCHEMA = 1


@dataclass(frozen=True)
class Value:
    """One measured figure, in base units."""

    value: float
    unit: str
    spread: float | None = None  # (p90 - p10) / median
    num_samples: int | None = None
    share_of_ceiling: float | None = None  # 0..1; None where no ceiling is known
    ceiling_source: Literal["measured", "datasheet"] | None = None

    def __post_init__(self) -> None:
        if (self.share_of_ceiling is None) != (self.ceiling_source is None):
            raise UsageError(
                "a share of a ceiling needs the ceiling's source, and the source needs the share"
            )

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Value:
        reject_unknown_keys(data, {f.name for f in fields(cls)}, "a record's value")
        return cls(**data)


@dataclass(frozen=True)
class Record:
    """What one run measured, and in which environment."""

    name: str
    command: tuple[str, ...]
    created: str  # UTC, ISO 8601
    commit: str | None  # of Ridgeline's own checkout; None when installed from a package
    dirty: bool | None  # whether that checkout had changes
    hardware: Mapping[str, Any]  # Hardware.summary()
    versions: Mapping[str, str]
    clocks: Clocks | None
    values: Mapping[str, Value]
    notes: tuple[str, ...] = ()
    schema: int = field(default=SCHEMA)

    @classmethod
    def create(
        cls,
        name: str,
        hardware: Hardware,
        values: Mapping[str, Value],
        command: Sequence[str] | None = None,
        notes: Sequence[str] = (),
        clocks: Clocks | None = None,
    ) -> Record:
        """Stamp values with time, device and versions. `command` defaults to this process's;
        `clocks` are those of the run (`ClockSampler`), else they are read now.
        """
        commit, dirty = source_commit()
        return cls(
            name=name,
            command=tuple(command if command is not None else ("ridgeline", *sys.argv[1:])),
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            commit=commit,
            dirty=dirty,
            hardware=hardware.summary(),
            versions=versions_of(hardware),
            clocks=clocks if clocks is not None else read_clocks(hardware),
            values=dict(values),
            notes=tuple(notes),
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"command": list(self.command), "notes": list(self.notes)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Record:
        names = {f.name for f in fields(cls)}
        reject_unknown_keys(data, names, "a record")
        missing = sorted(names - {"notes", "schema"} - set(data))
        if missing:
            raise UsageError(f"a record is missing {', '.join(missing)}")
        if data.get("schema", SCHEMA) != SCHEMA:
            raise UsageError(f"a record of schema {data['schema']}; this Ridgeline reads {SCHEMA}")
        clocks = data["clocks"]
        if clocks is not None:
            reject_unknown_keys(clocks, {f.name for f in fields(Clocks)}, "a record's clocks")
        return cls(
            **{
                **data,
                "command": tuple(data["command"]),
                "clocks": None if clocks is None else Clocks(**clocks),
                "values": {key: Value.from_json(value) for key, value in data["values"].items()},
                "notes": tuple(data.get("notes", ())),
            }
        )

    def save(self, folder: str | Path) -> Path:
        """Write `<name>-<device>-<date>.json` into `folder`; with a number if it exists."""
        stem = "-".join(map(slug, (self.name, self.hardware["name"]))) + f"-{self.created[:10]}"
        path = Path(folder) / f"{stem}.json"
        count = 1
        while path.exists():
            count += 1
            path = Path(folder) / f"{stem}-{count}.json"
        with atomic_write(path) as file:
            json.dump(self.to_json(), file, indent=2, allow_nan=False)
            file.write("\n")
        return path


def source_commit() -> tuple[str | None, bool | None]:
    """Commit and dirtiness of the checkout this runs from; (None, None) if it is not one."""
    package = Path(__file__).resolve().parent
    top = _git(package, "rev-parse", "--show-toplevel")
    # An installed copy inside someone's repository must not be stamped with that repository's
    # commit.
    if top is None or Path(top).resolve() != package.parent:
        return None, None
    status = _git(package, "status", "--porcelain", "--untracked-files=no")
    return _git(package, "rev-parse", "HEAD"), None if status is None else bool(status)


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True, text=True, timeout=10, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def versions_of(hardware: Hardware) -> dict[str, str]:
    """Versions of everything that figures may depend on."""
    return {
        "ridgeline": __version__,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.release()} {platform.machine()}",
        **hardware.versions,
    }


def slug(text: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-") or "unknown"
