"""The sequences of a step as the model sees them: keys and values in pages, one file for each way
of attending over them (decode rows, fresh prompts, a CPU, deterministic).
"""
