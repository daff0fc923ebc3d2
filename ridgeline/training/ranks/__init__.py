"""Training over several ranks: what each has of the model, and what they tell each other."""
