"""What a model needs on a cluster before money is spent: what fits, how fast, how sure."""
