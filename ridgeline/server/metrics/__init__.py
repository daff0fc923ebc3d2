"""What a server counts and shows: meters, history, the verdict, Prometheus, Grafana, spans."""
