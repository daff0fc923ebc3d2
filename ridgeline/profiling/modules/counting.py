"""The work of every torch op that a callable runs: FLOPs of matrices, bytes read and written, and
the module whose op it is, forward and backward.

FLOPs are torch's own formulas, and ours for the few fused ops that it has none for. Bytes are those
of the tensors that go in and come out, once each: what an op must move when nothing is left in a
cache. Views and allocations move nothing, a look-up only what it takes.

    with Following(names) as following, Counting(following, parameters) as counting:
        module(x)
    counting.ops[0]      # Op("aten.addmm", "encoder.layers.0.linear1", "forward", flops=…)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from ridgeline.formats.dtypes import dtype_name
from ridgeline.profiling.modules.paths import Numbered, PathFollower

DispatchKey: Any = torch._C.DispatchKey
REDUCTION_TAG = getattr(torch.Tag, "reduction", None)  # torch 2.13 has it
OpKind = Literal["matrix", "attention", "pointwise", "reduction", "copy", "look-up", "other"]
ModulePass = Literal["forward", "backward"]

NO_NODE = 2**64 - 1  # sequence number of the nodes that sum gradients up
GRADIENTS = "(gradients)"  # the path of what no module's forward made
NOTHING_MOVES = {"_unsafe_view", "_reshape_alias", "lift_fresh", "empty_like", "new_empty"} | {
    "empty", "empty_strided", "new_empty_strided", "detach", "resize_", "is_same_size", "alias",
}  # fmt: skip
LOOK_UPS = {"embedding", "index_select", "index", "gather", "_embedding_bag", "take"}
COPIES = {"clone", "copy_", "_to_copy", "_foreach_copy_", "cat", "contiguous", "constant_pad_nd"}
# Along a row or a channel: fused by a compiler like the pointwise ones around them.
REDUCTIONS = {
    "native_layer_norm", "_fused_rms_norm", "native_group_norm", "native_batch_norm", "mean", "sum",
    "_native_batch_norm_legit_no_training", "_native_batch_norm_legit", "_softmax", "_log_softmax",
    "_safe_softmax", "amax", "amin", "argmax", "var_mean", "linalg_vector_norm", "cudnn_batch_norm",
    "native_layer_norm_backward", "_softmax_backward_data", "_log_softmax_backward_data",
    "native_batch_norm_backward", "native_group_norm_backward",
}  # fmt: skip


@dataclass(frozen=True)
class OpCall:
    """One call of one op."""

    name: str  # "aten.addmm"
    path: str  # of its module
    phase: ModulePass
    kind: OpKind
    flops: float
    num_bytes: int
    weight_bytes: int  # of these, parameters of the module
    dtype: str  # of the numbers it computes with: "fp32"


class Counting(TorchDispatchMode):
    """Sees each op when it runs, within a scope of its own where scopes are given."""

    def __init__(
        self, following: PathFollower, parameters: Iterable[Tensor], scopes: Numbered | None = None
    ) -> None:
        super().__init__()
        self.ops: list[OpCall] = []
        self.numbers: list[int] = []  # of their scopes
        self._following, self._scopes = following, scopes
        self._weights = {_place(tensor) for tensor in parameters}
        self._paths: dict[int, str] = {}  # of the forward op, by autograd's number

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "profiler":  # ranges of modules in a trace: no work of theirs
            return func(*args, **kwargs)
        if _is_composite(func):
            with self:
                made = func.decompose(*args, **kwargs)
            if made is not NotImplemented:
                return made
        phase, path = self._where()
        out = self._run(path, lambda: func(*args, **kwargs))
        self.ops.append(counted(func, args, kwargs, out, self._weights, phase, path))
        return out

    def _run(self, path: str, call: Callable[[], Any]) -> Any:
        if self._scopes is None:
            return call()
        self.numbers.append(self._scopes.begin(path))
        try:
            return call()
        finally:
            self._scopes.end()

    def _where(self) -> tuple[ModulePass, str]:
        node = torch._C._current_autograd_node()
        if node is None:
            # The node of an op's gradient, where it has one, was made just before the op runs.
            number = torch.autograd._get_sequence_nr() - 1
            self._paths.setdefault(number, self._following.path)
            return "forward", self._following.path
        number = node._sequence_nr()
        return "backward", GRADIENTS if number == NO_NODE else self._paths.get(number, GRADIENTS)


def _is_composite(func: Any) -> bool:
    """Made of other ops, which are then seen instead: in inference mode they come undivided."""
    if func._overloadpacket in flop_registry:
        return False
    return bool(func.has_kernel_for_dispatch_key(DispatchKey.CompositeImplicitAutograd))


def counted(
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    out: Any,
    weights: set[int],
    phase: ModulePass,
    path: str,
) -> OpCall:
    given, made = list(_tensors((args, kwargs))), list(_tensors(out))
    name = str(func._overloadpacket)
    own = name.split(".")[-1]
    flops = _flops(func, args, kwargs, out)
    num_bytes = _bytes_moved(func, own, given, made)
    weight_bytes = sum({_place(t): _size(t) for t in given if _place(t) in weights}.values())
    floats = [t for t in (*given, *made) if t.is_floating_point()]
    dtype = dtype_name(max(floats, key=_size).dtype) if floats else "int64"
    kind = _kind(func, own, flops)
    return OpCall(name, path, phase, kind, flops, num_bytes, min(weight_bytes, num_bytes), dtype)


def _tensors(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, list | tuple):
        for each in tree:
            yield from _tensors(each)
    elif isinstance(tree, dict):
        for each in tree.values():
            yield from _tensors(each)


def _flops(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> float:
    formula = flop_registry.get(func._overloadpacket)
    if formula is not None:
        return float(formula(*args, **kwargs, out_val=out))
    own = OWN_FORMULAS.get(str(func._overloadpacket))
    return 0.0 if own is None else own(*args, **kwargs)


def _bytes_moved(func: Any, own: str, given: list[Tensor], made: list[Tensor]) -> int:
    if func.is_view or own in NOTHING_MOVES:
        return 0
    written = sum(_size(tensor) for tensor in made)
    if own in LOOK_UPS:
        indices = sum(_size(tensor) for tensor in given if not tensor.is_floating_point())
        return 2 * written + indices
    read = {(_place(tensor), tensor.shape): _size(tensor) for tensor in given}
    if own == "copy_":
        return sum(list(read.values())[1:]) + written
    return sum(read.values()) + written


def _size(tensor: Tensor) -> int:
    """Bytes that hold it: of an expanded tensor, what is there."""
    if tensor.layout is not torch.strided:
        return tensor.numel() * tensor.element_size()
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def _place(tensor: Tensor) -> int:
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # of a sparse or a wrapped tensor
        return id(tensor)


def _kind(func: Any, own: str, flops: float) -> OpKind:
    if "attention" in own:
        return "attention"
    if flops > 0:
        return "matrix"
    if own in COPIES:
        return "copy"
    if own in LOOK_UPS:
        return "look-up"
    tags = func.tags
    if own in REDUCTIONS or (REDUCTION_TAG is not None and REDUCTION_TAG in tags):
        return "reduction"
    return "pointwise" if torch.Tag.pointwise in tags else "other"


# What torch has no formula for.


def _attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> float:
    """Both products, [B, N, S, H]: as if nothing were masked."""
    batch, heads, queries, head_dim = query.shape
    return 2.0 * batch * heads * queries * key.shape[-2] * (head_dim + value.shape[-1])


def _encoder_layer(src: Tensor, embed_dim: int, *operands: Any, **_: Any) -> float:
    """Projections, attention and MLP of nn.TransformerEncoderLayer's fused forward."""
    inner = operands[12].shape[0]
    return _self_attention(src, embed_dim) + 4.0 * _num_rows(src) * embed_dim * inner


def _own_attention(query: Tensor, key: Tensor, value: Tensor, embed_dim: int, *_: Any) -> float:
    """Of nn.MultiheadAttention's fused forward."""
    return _self_attention(query, embed_dim)


def _self_attention(src: Tensor, embed_dim: int) -> float:
    tokens, length = _num_rows(src), src.shape[-2]
    return 8.0 * tokens * embed_dim**2 + 4.0 * tokens * length * embed_dim


def _recurrent(src: Tensor, *operands: Any, **_: Any) -> float:
    """Each step multiplies by every matrix once."""
    matrices = [tensor for tensor in _tensors(operands[:4]) if tensor.dim() == 2]
    return 2.0 * _num_rows(src) * sum(tensor.numel() for tensor in matrices)


def _num_rows(tensor: Tensor) -> int:
    return tensor.numel() // tensor.shape[-1]


OWN_FORMULAS: dict[str, Callable[..., float]] = {
    "aten._scaled_dot_product_flash_attention_for_cpu": _attention,
    "aten._scaled_dot_product_fused_attention_overrideable": _attention,
    "aten._scaled_dot_product_attention_math_for_mps": _attention,
    "aten._transformer_encoder_layer_fwd": _encoder_layer,
    "aten._native_multi_head_attention": _own_attention,
    "aten.mkldnn_rnn_layer": _recurrent,
    "aten._cudnn_rnn": _recurrent,
}
