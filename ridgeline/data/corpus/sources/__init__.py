"""Documents of files of every kind, each with its place; what cannot be read has a reason."""
