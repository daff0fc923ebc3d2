"""The engine in a process of its own, and the supervisor that starts another one when it dies."""
