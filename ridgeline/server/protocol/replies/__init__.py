"""From the engine's outputs to bodies and events, for each route."""
