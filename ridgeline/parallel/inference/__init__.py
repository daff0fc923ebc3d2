"""An engine's model on several ranks: `group.py` is who they are and `links.py` how they talk,
`launch.py` starts them; `tensor.py` and `stages.py` cut the model, `coded.py` and `filling.py`
bring each rank its part of the weights.
"""
