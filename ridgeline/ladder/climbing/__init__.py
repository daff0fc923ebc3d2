"""A whole climb: the search, what is measured at its end, and the folder it leaves."""
