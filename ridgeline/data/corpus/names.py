"""Names of files in a corpus that others look for before they read any."""

INDEX_NAME = "index.json"
