"""Which layouts and settings there are, and which of them is the fastest that fits."""
