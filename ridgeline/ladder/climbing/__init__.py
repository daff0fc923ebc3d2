"""The climb: which rung is tried next, within which budget, and what is kept."""
