"""One folder an op, listed in registry.py; op.py says what is known of an op beside its code.
`reference.py` is plain fp32 PyTorch: the definition of right, and what a CPU runs.

Not ops: `attention/` is what the attention ops share, `host_attention/` serves a CPU without a C++
compiler, `choices/` holds tile sizes that were measured, by device. To add an op: docs/map.md.
"""
