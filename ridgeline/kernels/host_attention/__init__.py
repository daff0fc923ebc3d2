"""Attention over pages on a CPU in torch's own products: what serves where no C++ compiler is at
hand to build prefill_attention/cpu.cpp.

`decode_attention` takes one token of each sequence, over `DecodeItems` that are worked out once a
step; `prompt_attention` the new tokens of one sequence. It is no op of the registry: nothing is
compiled, and its definition is kernels/attention's.
"""

from ridgeline.kernels.host_attention.pages import (
    DecodeItems,
    decode_attention,
    decode_items,
    prompt_attention,
)

__all__ = ["DecodeItems", "decode_attention", "decode_items", "prompt_attention"]
