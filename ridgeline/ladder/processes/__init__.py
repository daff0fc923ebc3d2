"""States measured in processes of their own."""
