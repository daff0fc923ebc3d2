"""The answer before it is measured, what earlier climbs came to, and the ladder to it."""
