"""What a training step takes on a cluster: its work, its collectives, its pipeline."""
