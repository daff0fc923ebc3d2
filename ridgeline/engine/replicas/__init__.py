"""Many replicas of an engine behind one server, on one machine or several, placed by Ray."""
