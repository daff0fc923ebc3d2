"""CUDA C++ kernels: an op's `cuda.cu`, built once for this machine, kept in the cache, called
through ctypes.

The sources export plain C functions over pointers and include nothing of torch, so one builds in
seconds and holds for any torch version. `build` goes through torch.utils.cpp_extension, which
translates the source first where torch is a ROCm build. `library` never builds: a request is never
held up by a compiler, and Triton serves until `ridgeline kernels build` was run.

    build("skinny_linear")
    library("skinny_linear").ridgeline_few_rows(...)

Headers that several sources share stand in this folder (`few_rows.cuh`).
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import re
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from ridgeline.errors import UnsupportedError
from ridgeline.hardware.paths import cache_dir
from ridgeline.kernels.autotune import is_tuned
from ridgeline.kernels.compile import CompiledKernel
from ridgeline.kernels.registry import NAMES
from ridgeline.kernels.targets import Target

FLAGS = ("-O3", "-std=c++17", "-lineinfo", "--split-compile=0")
log = logging.getLogger(__name__)


def source(op: str) -> Path:
    return Path(__file__).parent / op / "cuda.cu"


def source_text(op: str) -> str:
    """All that is compiled: the source, and every header of ours that it includes."""
    return "".join(part.read_text() for part in included_files(source(op)))


def included_files(path: Path) -> list[Path]:
    """A C++ file and what it includes by a quoted path, each once."""
    files = [path.resolve()]
    for file in files:  # grows as it is walked
        names = re.findall(r'^#include "(.+)"', file.read_text(), re.M)
        headers = [(file.parent / name).resolve() for name in names]
        files += [header for header in dict.fromkeys(headers) if header not in files]
    return files


def sources() -> list[str]:
    """The ops that have one."""
    return [op for op in NAMES if source(op).is_file()]


def library(op: str, defines: tuple[str, ...] = ()) -> ctypes.CDLL | None:
    """The built kernels of an op for this machine's GPU; None where they were not built, or are not
    to be used (autotune.py). `defines` name another build of the same source
    ("RIDGELINE_PORTABLE").
    """
    return _library(op, defines) if is_tuned() else None


@lru_cache
def _library(op: str, defines: tuple[str, ...]) -> ctypes.CDLL | None:
    if not torch.cuda.is_available():
        return None
    path = built_path(op, defines)
    if path.is_file():
        return ctypes.CDLL(str(path))
    log.info(
        "%s: not built in CUDA C++, using Triton (build it with `ridgeline kernels build`)", op
    )
    return None


def built_path(op: str, defines: tuple[str, ...] = ()) -> Path:
    return library_path(extension_name(op, defines))


def library_path(name: str) -> Path:
    return cache_dir() / "extensions" / name / f"{name}.so"


def extension_name(op: str, defines: tuple[str, ...] = ()) -> str:
    """Changes with the source, the flags, the compiler's version and the chip."""
    major, minor = torch.cuda.get_device_capability()
    version = torch.version.hip or torch.version.cuda
    return hashed_name(op, source_text(op) + f"{FLAGS} {defines} {version} {major}.{minor}")


def hashed_name(op: str, text: str) -> str:
    """A library's name, from all that it was made of."""
    return f"ridgeline_{op}_{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def build(op: str, defines: tuple[str, ...] = ()) -> Path:
    """Compile an op's source for this machine's GPU, unless that was done, and return the file."""
    if not torch.cuda.is_available():
        raise UnsupportedError(
            "building kernels needs a GPU; `ridgeline kernels compile` checks the sources without"
        )
    path = built_path(op, defines)
    if not path.is_file():
        _compile_extension(op, path, defines)
        _library.cache_clear()
    return path


def build_all() -> None:
    """Every op's, at the same time: nvcc takes one core for each."""
    with ThreadPoolExecutor() as pool:
        list(pool.map(build, sources()))


def _compile_extension(op: str, path: Path, defines: tuple[str, ...]) -> None:
    from torch.utils import cpp_extension

    if not cpp_extension.is_ninja_available():
        raise UnsupportedError("building kernels needs ninja; install it with `pip install ninja`")
    path.parent.mkdir(parents=True, exist_ok=True)
    major, minor = torch.cuda.get_device_capability()
    os.environ.setdefault("TORCH_CUDA_ARCH_LIST", f"{major}.{minor}")
    try:
        cpp_extension.load(
            path.stem,
            [str(source(op))],
            extra_cuda_cflags=[*FLAGS, *(f"-D{name}" for name in defines)],
            build_directory=str(path.parent),
            is_python_module=False,
            with_cuda=True,
        )
    except (OSError, RuntimeError, subprocess.CalledProcessError) as error:
        reason = next((line for line in str(error).splitlines() if "error" in line), str(error))
        raise UnsupportedError(f"{op}: cuda.cu could not be built: {reason.strip()}") from error


def pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def stream_of(device: torch.device) -> int:
    """The current stream, as the sources take it; 0 on a CPU, where tests run them."""
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


def find_nvcc() -> str | None:
    """The CUDA compiler, whether or not a GPU is here."""
    home = os.environ.get("CUDA_HOME")
    if home and (Path(home) / "bin" / "nvcc").is_file():
        return str(Path(home) / "bin" / "nvcc")
    return shutil.which("nvcc")


def compile_source(op: str, target: Target) -> list[CompiledKernel]:
    """What each kernel of an op's source takes of a target, by nvcc alone: no GPU is needed."""
    nvcc = find_nvcc()
    assert nvcc is not None, "ask find_nvcc first"
    with tempfile.TemporaryDirectory() as folder:
        command = [nvcc, *FLAGS, f"-arch={target.name}", "-cubin", "-Xptxas", "-v"]
        command += ["-o", f"{folder}/kernel.cubin", str(source(op))]
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        reason = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr)
        raise UnsupportedError(f"{op}/cuda.cu for {target.name}: {reason.strip()}")
    return parse_resources(done.stderr, target)


def parse_resources(report: str, target: Target) -> list[CompiledKernel]:
    """What ptxas says of each kernel: three lines with its name, its spills, its registers."""
    pattern = re.compile(
        r"Compiling entry function '(\w+)'.*?"
        r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads.*?"
        r"Used (\d+) registers([^\n]*)",
        re.S,
    )
    kernels = []
    for name, stack, stores, loads, registers, rest in pattern.findall(report):
        shared = re.search(r"(\d+) bytes smem", rest)
        spilled = int(stack) + int(stores) + int(loads)
        size = int(shared.group(1)) if shared else 0
        kernels.append(CompiledKernel(name, int(registers), spilled, size, target.shared_bytes))
    return kernels
