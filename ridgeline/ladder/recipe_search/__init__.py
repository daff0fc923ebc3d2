"""A search over serving recipes: `choices` (what may be searched), `trials` (a recipe beside the
defaults, by the bench of `optimize`), `answer` (what is left).
"""
