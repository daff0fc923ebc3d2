"""Many replicas of an engine behind one server, on one machine or several, placed by Ray."""

from ridgeline.engine.replicas.engine import ReplicatedEngine

__all__ = ["ReplicatedEngine"]
