"""What a change would give: the model of a step, and gains.py, the one owner of predictions."""
