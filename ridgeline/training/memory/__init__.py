"""The memory that a run takes, itemised before anything is loaded."""
