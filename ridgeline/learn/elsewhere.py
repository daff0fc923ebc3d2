"""What has to happen in another process: Triton's compiler where kernels are interpreted in this
one, and ranks that talk to each other.

    compiled_instructions(__file__, "product_kernel", {"a_ptr": "*bf16"}, {"BM": 128}, ("wgmma",))
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

COMPILE = """
import json, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
job = json.loads(sys.stdin.read())
names = {"triton": triton, "tl": triton.language}
path = sys.argv[1]
exec(compile(open(path).read(), path, "exec"), names)
kernel = names[job["kernel"]]
order = {name: at for at, name in enumerate(kernel.arg_names)}
signature = {name: job["types"].get(name, "constexpr") for name in kernel.arg_names}
constants = {(order[name],): value for name, value in job["constants"].items()}
kinds = job["types"].items()
aligned = {(order[name],): [["tt.divisibility", 16]] for name, kind in kinds if kind != "fp32"}
source = ASTSource(kernel, signature, constants, aligned)
backend, architecture, warp = job["target"]
options = {"num_warps": job["num_warps"], "num_stages": job["num_stages"]}
done = triton.compile(source, target=GPUTarget(backend, architecture, warp), options=options)
text = done.asm["ptx" if backend == "cuda" else "amdgcn"]
print(json.dumps({word: text.count(word) for word in job["words"]}))
"""
HOPPER = ("cuda", 90, 32)
MI300 = ("hip", "gfx942", 64)
Target = tuple[str, int | str, int]


def compiled_instructions(
    file: str,
    kernel: str,
    types: Mapping[str, str],
    constants: Mapping[str, int],
    words: Sequence[str],
    target: Target = HOPPER,
    num_warps: int = 8,
    num_stages: int = 3,
) -> dict[str, int]:
    """How often each of `words` stands in the assembly of a kernel, compiled for a chip that need
    not be here. The kernel is taken from a lesson's file by its name.
    """
    job = {
        "kernel": kernel,
        "types": dict(types),
        "constants": dict(constants),
        "words": list(words),
        "target": list(target),
        "num_warps": num_warps,
        "num_stages": num_stages,
    }
    source = _kernel_file(Path(__file__).parent / "lessons" / Path(file).name, kernel)
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    try:
        done = subprocess.run(
            [sys.executable, "-c", COMPILE, str(source)],
            input=json.dumps(job),
            capture_output=True,
            text=True,
            env=environment,
            timeout=300,
        )
    finally:
        source.unlink()
    if done.returncode:
        raise RuntimeError(f"{kernel} did not compile: {done.stderr.strip()[-600:]}")
    counts = json.loads(done.stdout.splitlines()[-1])
    return {str(word): int(count) for word, count in counts.items()}


def _kernel_file(path: Path, kernel: str) -> Path:
    """A file with nothing in it but the kernel, where Triton looks for its source."""
    import ast
    import tempfile

    text = path.read_text(encoding="utf-8")
    node = next(
        each
        for each in ast.walk(ast.parse(text))
        if isinstance(each, ast.FunctionDef) and each.name == kernel
    )
    lines = text.splitlines()[node.decorator_list[0].lineno - 1 : node.end_lineno]
    imports = "import triton\nimport triton.language as tl\n\n"
    handle, name = tempfile.mkstemp(suffix=".py")
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(imports + "\n".join(lines) + "\n")
    return Path(name)


def run_python(code: str, *arguments: str, timeout_s: float = 120) -> str:
    """What a program prints."""
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
    if done.returncode:
        raise RuntimeError(f"ended with {done.returncode}: {done.stderr.strip()[-600:]}")
    return done.stdout
