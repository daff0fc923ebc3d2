"""Training on one device: a model and text in, checkpoints that every engine loads out.

`naive.py` is the truth: a plain fp32 loop, against which everything else is tested. The rest, from
below: `documents.py` (attention over packed documents), `loss.py`, `config.py` (`TrainConfig`),
`schedule.py`, `precision.py` (fp32 masters), `recomputation.py`, `optimizer.py`, `step.py` (one
step), `checkpoint.py`, `metrics.py`, `evaluation.py`, `prepare.py` (from names to a model and its
batches), `run.py` (the loop). Adapters: `adapters.py` (the layers), `frozen.py` (their step),
`adapter_files.py`, `merge.py`. Rounded and pruned weights: `rounded.py`; teachers:
`distillation.py`.
"""
