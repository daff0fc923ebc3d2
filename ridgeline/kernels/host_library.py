"""CPU kernels: an op's `cpu.cpp`, built once for this machine by its own C++ compiler, kept in the
cache, called through ctypes: what extension.py is for CUDA C++.

The sources export plain C functions over pointers and include nothing of torch, so that all of them
build in a few seconds. They share torch's OpenMP threads: its libgomp is in the process already,
and is found by its name. An engine on a CPU calls `prepare` when it starts; where there is no
compiler, or it fails, one line says so and the references serve.

    if prepare():
        function("rms_norm", "bf16", "plplpffpplli")(...)
"""

from __future__ import annotations

import ctypes
import fcntl
import logging
import os
import platform
import re
import secrets
import shutil
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch  # before any library: its OpenMP is the one that is shared
from torch import Tensor

from ridgeline.errors import UnsupportedError
from ridgeline.formats.dtypes import dtype_name
from ridgeline.kernels.extension import hashed_name, included_files, library_path
from ridgeline.kernels.registry import NAMES
from ridgeline.progress import Progress

COMPILERS = ("c++", "g++", "clang++")
# Roots set no errno and comparisons raise no flags, so that loops over them become vectors.
OPTIMIZED = ("-O3", "-march=native", "-fopenmp", "-fno-math-errno", "-fno-trapping-math")
FLAGS = (*OPTIMIZED, "-std=c++17", "-shared", "-fPIC", "-w")
BUILD_TIMEOUT_S = 120  # a few seconds on an idle machine
ARGUMENTS = {
    "p": ctypes.c_void_p,
    "l": ctypes.c_int64,
    "f": ctypes.c_float,
    "i": ctypes.c_int,
}
log = logging.getLogger(__name__)


def source(op: str) -> Path:
    return Path(__file__).parent / op / "cpu.cpp"


def sources() -> list[str]:
    """The ops that have one."""
    return [op for op in NAMES if source(op).is_file()]


def find_compiler() -> str | None:
    return next(filter(None, map(shutil.which, COMPILERS)), None)


@cache
def compiler_version(compiler: str) -> str:
    done = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=60)
    return done.stdout


@cache
def processor() -> str:
    """What code for "native" depends on: the machine's instructions."""
    with suppress(OSError):
        text = Path("/proc/cpuinfo").read_text()
        match = re.search(r"^(flags|Features)\s*:(.*)$", text, re.M)
        if match is not None:
            return f"{platform.machine()} {match[2].strip()}"
    return f"{platform.machine()} {platform.processor()}"


def built_path(op: str, compiler: str) -> Path:
    """Changes with the sources, the flags, the compiler and the processor."""
    text = "".join(part.read_text() for part in included_files(source(op)))
    machine = f"{FLAGS} {compiler_version(compiler)} {processor()}"
    return library_path(hashed_name(f"{op}_host", text + machine))


def build(op: str) -> Path:
    """Compile an op's source for this machine, unless that was done, and return the file. Processes
    that want it at the same time wait for the first of them; where files cannot be locked each
    builds it, and puts it there whole.
    """
    compiler = find_compiler()
    if compiler is None:
        raise UnsupportedError(f"no C++ compiler here; install one of {', '.join(COMPILERS)}")
    path = built_path(op, compiler)
    if path.is_file():
        return path
    temporary = path.with_name(f".{os.getpid()}-{secrets.token_hex(4)}.so")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(source(op)):
            if not path.is_file():
                _compile(compiler, op, temporary)
                os.replace(temporary, path)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UnsupportedError(f"{op}: cpu.cpp could not be built: {error}") from error
    finally:
        with suppress(OSError):
            temporary.unlink()
    return path


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    """By one at a time, where the file system has locks; a process that ends lets go. Other sources
    are built at the same time.
    """
    handle = os.open(file, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _compile(compiler: str, op: str, target: Path) -> None:
    command = [compiler, *FLAGS, "-o", str(target), str(source(op))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S)
    if done.returncode:
        lines = done.stderr.splitlines() or [f"exit code {done.returncode}"]
        reason = next((line for line in lines if "error" in line), lines[0])
        raise UnsupportedError(f"{op}: cpu.cpp could not be built: {reason.strip()}")


_loaded: dict[str, ctypes.CDLL] = {}  # the registry's, all or none
_single: dict[str, ctypes.CDLL | None] = {}  # None: it could not be


def prepare(progress: Progress | None = None) -> bool:
    """Build what is not built yet and load it; False, and why in the log, where that cannot be."""
    wanted = [op for op in sources() if op not in _loaded]
    if not wanted:
        return True
    try:
        for op, path in zip(wanted, _built(wanted, progress), strict=True):
            _loaded[op] = ctypes.CDLL(str(path))
    except (UnsupportedError, OSError) as error:
        _loaded.clear()
        log.warning("CPU kernels are not used, falling back to the slower references: %s", error)
        return False
    return True


def _built(ops: list[str], progress: Progress | None) -> list[Path]:
    compiler = find_compiler()
    missing = compiler is None or any(not built_path(op, compiler).is_file() for op in ops)
    if progress is not None and missing:
        progress("building CPU kernels", 0, len(ops))
    with ThreadPoolExecutor(len(ops)) as pool:
        return list(pool.map(build, ops))


def load(name: str) -> bool:
    """Build and load one source that is no op of the registry; False, and why in the log, where
    that cannot be.
    """
    if name not in _single:
        try:
            _single[name] = ctypes.CDLL(str(build(name)))
        except (UnsupportedError, OSError) as error:
            log.warning("%s is not used in C++, falling back to a slower way: %s", name, error)
            _single[name] = None
    return _single[name] is not None


def is_loaded() -> bool:
    return bool(_loaded)


@cache
def function(op: str, name: str, signature: str) -> Callable[..., Any]:
    """An exported function; `signature` has a letter for each argument (p pointer, l 64-bit number,
    f float, i int). `prepare` or `load` comes first.
    """
    library = _loaded.get(op) or _single.get(op)
    assert library is not None, f"{op} is called before it was prepared"
    exported = getattr(library, f"ridgeline_{op}_{name}")
    exported.argtypes = [ARGUMENTS[letter] for letter in signature]
    exported.restype = ctypes.c_int
    return exported


@cache
def short_name(dtype: torch.dtype) -> str:
    return dtype_name(dtype)


def address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def rows_of(x: Tensor) -> Tensor:
    """Two dims, the last one contiguous; a view where the strides allow it."""
    if x.dim() == 2 and x.stride(1) == 1:
        return x
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(-1) == 1 else rows.contiguous()
