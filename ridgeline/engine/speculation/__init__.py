"""Drafts: who proposes tokens ahead, how many pay off, and what the main loop does about it."""
