"""The input as units of work: which files, cut where."""
