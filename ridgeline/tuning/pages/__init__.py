"""Pages of `ridgeline tune`: one HTML file each, that needs no network."""
