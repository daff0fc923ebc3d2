"""Whether a changed model is still right: perplexity, divergence from the original and task scores,
each with a confidence interval and run the way the recipe runs the model; and which layers lose
most.
"""
