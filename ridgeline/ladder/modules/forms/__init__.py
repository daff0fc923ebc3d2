"""A module in a form: copies of it, changed as the form says."""
