"""The climb of a training step: `ridgeline optimize --train MODEL` (docs/training.md)."""
