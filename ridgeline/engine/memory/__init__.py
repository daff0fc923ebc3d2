"""How much memory everything takes, known before anything is loaded: plan.py says what fits and how
many pages are left for keys and values, footprint.py what weights, steps and graphs take,
activations.py and fixed_activations.py what a forward pass allocates.
"""
