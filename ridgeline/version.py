"""The version, once: the package, its records and its wheel read it here."""

__version__ = "0.1.0"
