"""All layers of a step in one call of C++, on a CPU, for a plain decoder whose weights are in a
GGUF file's blocks: threads that take items of stages and spin, instead of a join at every op.
`cpu.py` calls `cpu.cpp`; the definition is the model's own (models/transformer.py), op by op.
"""
