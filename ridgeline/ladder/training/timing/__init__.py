"""Forms of a training step, timed in this process or in one of their own."""
