"""What a run shows and guards: metrics, MFU, lost updates, bad steps and their replay."""
