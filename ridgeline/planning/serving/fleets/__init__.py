"""Simulated replicas and the traffic between them."""
