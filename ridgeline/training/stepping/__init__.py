"""One step: precision, forward pass with fused ops, gradients, the teacher, the optimizer."""
