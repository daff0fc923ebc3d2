"""Products with weights in a GGUF file's own blocks, on a CPU.

`reference.py` defines them: inputs are rounded to int8 with a scale for each 32 columns, weights
are what the blocks stand for. `cpu.cpp` multiplies codes with codes (AVX-512 VNNI, AVX-VNNI, AVX2,
NEON with dot products, or plain loops: whatever the machine that it is built on has), `cpu.py`
calls it.
"""

from __future__ import annotations

OP = "block_linear"
# Block types that are multiplied as they are, by ggml's numbers.
TYPES = {
    "Q4_0": 2,
    "Q4_1": 3,
    "Q5_0": 6,
    "Q5_1": 7,
    "Q8_0": 8,
    "Q4_K": 12,
    "Q5_K": 13,
    "Q6_K": 14,
}
PANEL = 16  # outputs whose codes lie side by side
MOST_PARTS = 4  # of one matrix, that are of different types
COLUMNS = 32  # of an input, that share a scale
