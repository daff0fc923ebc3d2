"""Steps on the device: the runner, captured graphs, what happens when a step fails, several ranks,
and what steps took.
"""
