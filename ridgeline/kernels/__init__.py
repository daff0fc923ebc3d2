"""One folder an op. `reference.py` is plain fp32 PyTorch: the definition of right, and what a CPU
runs.
"""
