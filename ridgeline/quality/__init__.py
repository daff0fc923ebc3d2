"""Whether a changed model is still right: perplexity, divergence from the original, task scores,
each with its confidence interval, through the recipe's own execution path; and which layers hurt.
"""
