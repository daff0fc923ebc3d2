"""What each rank holds, stage by stage: training's own plan, read for every layout."""
