"""What `ridgeline profile` runs: steps of chosen sizes, or a whole workload."""
