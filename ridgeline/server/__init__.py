"""The OpenAI-compatible server: protocol, routes, streaming, metrics, the page."""
