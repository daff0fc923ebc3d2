"""Whose a piece of a training step is, by a trace of torch.profiler: the op that runs, the autograd
functions around it (forward, backward, or forward again inside the backward pass), and on a GPU the
kernel's name.

    owners = StepOwners(config, num_tokens=4096)
    owners.of("aten::mm", ("NormLinearBackward",), ((4096, 3072), (3072, 2048)))
    # OpOwner("attn.qkv backward", "products")

Predictions (training_work.py) have the same names, so that one stands beside the other.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

from ridgeline.models import ModelConfig
from ridgeline.profiling.tracing.scopes import PREFIX
from ridgeline.quantization.sizes import MatrixSize, head_matrix, named_matrices

TrainingPart = Literal[
    "products", "attention", "loss", "element-wise", "optimizer", "communication", "copies"
]
TRAINING_TIMES = (*get_args(TrainingPart), "host")  # what a step's time divides into
BACKWARD, AGAIN = " backward", " again"  # behind an op's name: of gradients, or computed twice
OPTIMIZER = PREFIX + "optimizer"  # the range around the update
WAITED = PREFIX + "waits for "  # of ranges around what is waited for, with its name behind
# By names of torch's ops and of kernels; copies first, for a copy is one whatever it is for.
COPIES = re.compile(r"memcpy|memset|copy_kernel|CatArray|direct_copy|aten::(copy_|_to_copy)$", re.I)
ATTENTION = re.compile(
    r"flash|fmha|sdpa|scaled_dot_product|attention|delta_kernel|query_grad|key_grad", re.I
)
PRODUCTS = re.compile(
    r"gemm|nvjet|cutlass|xmma|cublas|splitK|aten::(mm|addmm|addmm_|bmm|baddbmm|_scaled_mm)$", re.I
)
COLLECTIVES = re.compile(r"(?:nccl|rccl)\w*?_(?P<kind>[A-Z][a-zA-Z]+)")  # kernels
KEPT = ("cpu_op", "user_annotation")
UPDATE = re.compile(r"adamw|multi_tensor|foreach|vector_norm", re.I)
FP8_CODES = re.compile(r"rows_to_fp8|_codes|largest", re.I)
LOSSES = ("LinearCrossEntropy", "ChunkedDivergence")
ATTENDING = ("ProductAttention", "DocumentAttention")
FRONTS = {  # autograd functions, and the element-wise op that is part of them
    "NormLinear": "norms",
    "FirstNormLinear": "norms",
    "AddNorm": "norms",
    "PlainNorm": "norms",
    "GatedLinear": "activation",
    "Gated": "activation",
    "Rotated": "rotary",
    "RotatedHeads": "rotary",
    "Fp8Linear": "fp8 codes",
    "Embedding": "embedding",
}
KERNELS = {  # of ours, where a function is several of them
    "norms": re.compile(r"norm", re.I),
    "activation": re.compile(r"gated|activation", re.I),
    "rotary": re.compile(r"rotary|rotate", re.I),
}
PROJECTIONS = ("PlainLinear", "FrozenLinear", "Fp8Linear", "PlainLinear")  # functions of any matrix
OTHERS = "others"
Dims = Sequence[Sequence[int]]


class OpOwner(NamedTuple):
    name: str
    part: TrainingPart


@dataclass(frozen=True)
class Frame:
    """An op or a range on the host."""

    name: str
    begin: float  # microseconds
    end: float
    dims: Dims
    parent: int | None  # its number among the thread's


class ThreadFrames:
    """What was open on one thread, and when."""

    def __init__(self, rows: Iterable[Mapping[str, Any]]) -> None:
        self.frames: list[Frame] = []
        opened: list[int] = []
        for row in sorted(rows, key=lambda row: (float(row["ts"]), -float(row.get("dur", 0)))):
            begin = float(row["ts"])
            while opened and self.frames[opened[-1]].end <= begin:
                opened.pop()
            dims = row.get("args", {}).get("Input Dims", ())
            end = begin + float(row.get("dur", 0.0))
            parent = opened[-1] if opened else None
            self.frames.append(Frame(str(row["name"]), begin, end, dims, parent))
            opened.append(len(self.frames) - 1)
        self._begins = [frame.begin for frame in self.frames]

    def own_us(self) -> list[float]:
        """Of each frame, what none inside it covers."""
        own = [frame.end - frame.begin for frame in self.frames]
        for frame in self.frames:
            if frame.parent is not None:
                own[frame.parent] -= frame.end - frame.begin
        return [max(0.0, each) for each in own]

    def around(self, index: int | None) -> list[Frame]:
        """The frame and those around it, the innermost first."""
        result = []
        while index is not None:
            result.append(self.frames[index])
            index = self.frames[index].parent
        return result

    def open_at(self, moment: float) -> list[Frame]:
        """The innermost first."""
        index: int | None = bisect_right(self._begins, moment) - 1
        if index is not None and index < 0:
            return []
        while index is not None and self.frames[index].end < moment:
            index = self.frames[index].parent
        return self.around(index)


def threads_of(document: Mapping[str, Any]) -> dict[Any, ThreadFrames]:
    """By the number of the thread."""
    rows: dict[Any, list[Mapping[str, Any]]] = {}
    for row in document.get("traceEvents", ()):
        is_async = str(row.get("name", "")).startswith("gloo:")  # and ends in another thread
        if row.get("ph") == "X" and row.get("cat") in KEPT and not is_async:
            rows.setdefault(row.get("tid"), []).append(row)
    return {thread: ThreadFrames(each) for thread, each in rows.items()}


class StepOwners:
    """The ops of one model's steps."""

    def __init__(self, config: ModelConfig, num_tokens: int) -> None:
        self._matrices: dict[str, MatrixSize] = {
            name.split(".", 2)[2]: matrix for name, matrix in named_matrices(config)
        }
        self._head, self._num_tokens = head_matrix(config), num_tokens
        self._has_experts = any(layer.experts is not None for layer in config.layers)

    def of(self, name: str, around: Sequence[str], dims: Dims = ()) -> OpOwner:
        """`name` is a kernel's or an op's, `around` the functions and ranges that were open, the
        innermost first.
        """
        if name.startswith(WAITED):
            return OpOwner(name.removeprefix(WAITED), "communication")
        if COLLECTIVES.match(name):
            return OpOwner(_collective(name), "communication")
        if OPTIMIZER in around or UPDATE.search(name):
            return OpOwner("optimizer", "optimizer")
        if COPIES.search(name):
            return OpOwner("copies", "copies")
        attending = next((each for each in around if _base(each) in ATTENDING), None)
        if attending is not None:
            return OpOwner("attention" + _direction(attending, around), "attention")
        if ATTENTION.search(name):
            return OpOwner("attention" + _direction(name, around), "attention")
        if PRODUCTS.search(name):
            return OpOwner(self._product(around, dims), "products")
        if any(each in LOSSES for each in around):  # not where gradients go on from it
            return OpOwner("loss", "loss")
        return OpOwner(_front(name, around), "element-wise")

    def _product(self, around: Sequence[str], dims: Dims) -> str:
        function = next((each for each in around if _is_function(each)), "")
        sizes = [tuple(each) for each in dims if len(each) == 2]
        if _base(function) in LOSSES:  # whose gradients are computed on the way
            is_forward = bool(sizes) and len(sizes) >= 2 and sizes[1][-1] == self._head.num_outputs
            return "head" + ("" if is_forward else BACKWARD)
        name = self._named(sizes[-2:], _base(function))
        return name + _direction(function, around)

    def _named(self, sizes: Sequence[tuple[int, ...]], function: str) -> str:
        """The projection whose weight, its input or its gradient has these sizes."""
        numbers = sorted((*sizes[0], sizes[1][-1])) if len(sizes) == 2 else []
        usual = {"PlainLinear": "attn.out", "GatedLinear": "mlp.down"}.get(function)
        for name, matrix in self._matrices.items():
            fits = numbers == sorted((self._num_tokens, matrix.num_outputs, matrix.depth))
            if fits and usual in (None, name):
                return name
        if usual is not None and usual in self._matrices:
            return usual
        return "mlp.experts" if self._has_experts else "adapters"


def _collective(name: str) -> str:
    """`all gather` of `ncclDevKernel_AllGather_RING_LL(…)`."""
    match = COLLECTIVES.match(name)
    assert match is not None, name
    return re.sub(r"(?<!^)(?=[A-Z])", " ", match["kind"]).lower()


def _front(name: str, around: Sequence[str]) -> str:
    """An element-wise op by the kernel's name, or by the function that it runs in."""
    function = next((each for each in around if _is_function(each)), "")
    direction = _direction(function, around)
    if FP8_CODES.search(name):
        return "fp8 codes"
    for front, pattern in KERNELS.items():
        if not name.startswith("aten::") and pattern.search(name):
            return front + (direction or (BACKWARD if "backward" in name else ""))
    if "embedding" in name or "index" in name or _base(function) == "Embedding":
        return "embedding"
    front = FRONTS.get(_base(function), OTHERS)
    return front if front in (OTHERS, "fp8 codes") else front + direction


def _direction(name: str, around: Sequence[str]) -> str:
    """Of an op or function: forward, backward, or forward inside the backward pass."""
    if re.search(r"backward|bwd|bprop|_grad|delta_kernel", name, re.I):
        return BACKWARD
    is_inside = any(each.startswith("autograd::engine") for each in around)
    return AGAIN if is_inside else ""


def has_own_work(name: str) -> bool:
    """A function that computes by itself on a CPU, in compiled passes that are no ops of torch."""
    return _base(name) in (*FRONTS, *LOSSES, *ATTENDING)


def _is_function(name: str) -> bool:
    base = _base(name)
    return base in FRONTS or base in LOSSES or base in PROJECTIONS


def _base(name: str) -> str:
    """`NormLinear` of `NormLinearBackward`; torch's own have a number behind."""
    return re.sub(r"Backward\d*$", "", name)
