"""Steps watched while they run: scopes, traces, and how the time of a step divides."""
