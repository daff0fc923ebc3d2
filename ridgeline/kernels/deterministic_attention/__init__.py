"""Attention whose bits do not depend on the batch, on how a prompt was cut, or on what came with
it: triton.py and decode.py on a GPU, host.py on a CPU.
"""
