"""Compiles what a launcher would launch for chips that are not in this machine, and reads what it
takes of them.

Runs in a process without TRITON_INTERPRET. A spill to memory, or more shared memory than the target
has, is a failure here rather than a surprise on the user's machine; the compiler itself reports
neither as an error.

    for call in recorded_calls(op, case, target): print(compile_call(call, target))
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ridgeline.kernels.launch import KernelCall, compiler_options, recording
from ridgeline.kernels.op import Case, Op
from ridgeline.kernels.targets import Target

TRITON_TYPES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float64: "fp64",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.bool: "i1",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e4m3fnuz: "fp8e4b8",
    torch.float8_e5m2: "fp8e5",
}


@dataclass(frozen=True)
class CompiledKernel:
    """What one kernel takes of the chip, per thread or program."""

    kernel: str
    registers: int
    spilled_bytes: int  # stack or scratch: registers that went to memory
    shared_bytes: int
    shared_limit: int
    undefined_reads: int = 0  # instructions that read a register nothing has written

    @property
    def problem(self) -> str | None:
        if self.undefined_reads:
            return f"{self.undefined_reads} instructions read what nothing has written"
        if self.spilled_bytes:
            return f"{self.spilled_bytes} bytes spilled"
        if self.shared_bytes > self.shared_limit:
            return f"{self.shared_bytes} bytes of shared memory, {self.shared_limit} there are"
        return None


def recorded_calls(op: Op, case: Case, target: Target) -> list[KernelCall]:
    """The launches an op would make for a case on a target; nothing runs."""
    inputs = case.make(torch.device("cpu"), torch.Generator().manual_seed(0))
    with recording(target) as calls:
        op.launch(**inputs)
    return calls


def compile_call(call: KernelCall, target: Target) -> CompiledKernel:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature, constants, attributes = describe(call)
    source = ASTSource(call.kernel, signature, constants, attributes)
    architecture: Any = int(target.name[3:]) if target.backend == "cuda" else target.name
    options = compiler_options(call.num_warps, call.num_stages, call.options)
    compiled = triton.compile(
        source, target=GPUTarget(target.backend, architecture, target.warp_size), options=options
    )
    undefined = 0
    if target.backend == "cuda":
        moves_bytes = handles_bytes(compiled.asm["ptx"])
        registers, spilled, undefined = cuda_resources(compiled.asm["cubin"], moves_bytes)
    else:
        registers, spilled = amd_resources(compiled.asm["amdgcn"])
    shared, limit = int(compiled.metadata.shared), target.shared_bytes
    return CompiledKernel(call.kernel.__name__, registers, spilled, shared, limit, undefined)


def describe(call: KernelCall) -> tuple[dict[str, str], dict[Any, Any], dict[Any, Any]]:
    """Signature, constants and alignment, as Triton's own launcher derives them."""
    names = list(call.kernel.arg_names)
    signature: dict[str, str] = {}
    constants: dict[Any, Any] = {}
    attributes: dict[Any, Any] = {}
    for index, name in enumerate(names):
        value = call.args[index] if index < len(call.args) else call.constants[name]
        kind = "constexpr" if index >= len(call.args) else argument_type(value)
        signature[name] = kind
        if kind == "constexpr":
            constants[(index,)] = value
        elif isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0):
            attributes[(index,)] = [["tt.divisibility", 16]]
    return signature, constants, attributes


def argument_type(value: Any) -> str:
    """`*bf16` for a tensor, `i32` for a number; None and 1 become constants, as when launched."""
    if isinstance(value, torch.Tensor):
        return "*" + TRITON_TYPES[value.dtype]
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value == 1):
        return "constexpr"
    if isinstance(value, bool):
        return "i1"
    if isinstance(value, int):
        return "i32" if -(2**31) <= value < 2**31 else "i64"
    assert isinstance(value, float), f"an argument of type {type(value).__name__}"
    return "fp32"


def handles_bytes(ptx: str) -> bool:
    """Numbers of 8 bits are read, written, converted, or put beside each other."""
    return re.search(r"\bprmt\.|e4m3|e5m2|\b(?:ld|st|cvt)\.[\w.:]*[bsu]8\b", ptx) is not None


def cuda_resources(cubin: bytes, disassemble: bool) -> tuple[int, int, int]:
    """Registers and stack bytes a thread, and, where it is disassembled, instructions with an
    operand that nothing has written; read by the `cuobjdump` that Triton's wheel carries.
    Disassembling takes half a second of any kernel (CUDA 13.1), resources alone a hundredth.
    """
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        sass = ["--dump-sass"] if disassemble else []
        command = [str(tool), "--dump-resource-usage", *sass, file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers = max(map(int, re.findall(r"REG:(\d+)", text)))
    stack = max(map(int, re.findall(r"STACK:(\d+)", text)))
    return registers, stack, undefined_reads(text) if disassemble and not stack else 0


def undefined_reads(sass: str) -> int:
    """Where ptxas loses a value it reads R1 in its place, the stack's pointer, which a kernel
    without a stack only sets (12.8, in Triton 3.6, with codes of fp8 that are used in two ways). As
    the last operand R1 fills bytes that are overwritten.
    """
    return len(re.findall(r"\*/\s+(?:@!?U?P\w+ )?[A-Z][\w.]* R\d+, R1\b", sass))


def amd_resources(assembly: str) -> tuple[int, int]:
    """Vector registers, and scratch plus vector spills in bytes; scalar spills are normal there."""

    def largest(field: str) -> int:
        return max(map(int, re.findall(rf"\.{field}:\s*(\d+)", assembly)), default=0)

    spilled = largest("private_segment_fixed_size") + 4 * largest("vgpr_spill_count")
    return largest("vgpr_count"), spilled
