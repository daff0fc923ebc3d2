"""Every op, and sequences of them, timed beside the machine's ceilings; and the tuner."""
