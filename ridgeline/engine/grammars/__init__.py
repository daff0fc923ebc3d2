"""Grammars are compiled here, in processes that can be stopped and killed."""
