"""Who and what is let in: connections, origins, keys, how many at once, and refusals."""
