"""Changes to a model that are measured before they are kept."""
