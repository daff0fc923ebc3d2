"""From a model's name to a model that is ready to run: the memory plan first, then weights, then
what a recipe changes about the model.
"""
