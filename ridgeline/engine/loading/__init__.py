"""From a model's name to a model that is ready to run: what fits (engine/memory), the weights, and
what a recipe changes about the model.
"""
