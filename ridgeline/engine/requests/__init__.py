"""What a request may ask for: `Sampling` with its defaults, the grammar an output must follow, and
stop strings. No torch here.
"""
