"""From a request's body to what it asks of the engine: fields, checks, conversations."""
