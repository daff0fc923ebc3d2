"""All layers of a step in one call of C++, on a CPU, for a plain decoder whose weights are in a GGUF
file's blocks: threads that spin at barriers instead of a join at every op. `cpu.py` calls `cpu.cpp`;
the definition is the model's own (models/transformer.py), op by op.
"""
