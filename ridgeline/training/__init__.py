"""Training on one device: a model and text in, checkpoints that every engine loads out.

`naive.py` is the truth: a plain fp32 loop, against which everything else is tested. The rest, from
below: `documents.py` (attention over packed documents), `loss.py`, `config.py` (`TrainConfig`),
`schedule.py`, `precision.py` (what weights are kept in), `memory.py` (what fits; `step_memory.py`:
a step's peak; `method_memory.py`: adapters, teachers), `utilization.py` (MFU), `ops.py`,
`fused.py`, `fp8.py`, `forward.py`, `optimizer.py`, `step.py` (one step), `checkpoint.py`,
`metrics.py`, `evaluation.py`, `prepare.py` (from names to a model and its batches), `run.py` (the
loop). Adapters: `adapters.py` (the layers), `frozen.py` (their step), `adapter_files.py`,
`merge.py`. Rounded and pruned weights: `rounded.py`; teachers: `distillation.py`.
"""
