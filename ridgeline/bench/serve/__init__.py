"""Load on an OpenAI endpoint, and what its clients saw of it."""
