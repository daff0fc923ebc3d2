"""How good codes are found: methods by name, and their options."""

from ridgeline.quantization.methods.awq import Awq
from ridgeline.quantization.methods.base import Method
from ridgeline.quantization.methods.gptq import Gptq
from ridgeline.quantization.methods.rtn import Rtn
from ridgeline.quantization.methods.smoothquant import SmoothQuant
from ridgeline.quantization.methods.sparsegpt import SparseGpt
from ridgeline.quantization.methods.sparsity import parse_sparsity
from ridgeline.quantization.methods.usual import usual_method
from ridgeline.quantization.methods.wanda import Wanda

METHODS: dict[str, type[Method]] = {
    method.name: method for method in (Rtn, Gptq, Awq, SmoothQuant, SparseGpt, Wanda)
}

__all__ = [
    "METHODS",
    "Awq",
    "Gptq",
    "Method",
    "Rtn",
    "SmoothQuant",
    "SparseGpt",
    "Wanda",
    "parse_sparsity",
    "usual_method",
]
