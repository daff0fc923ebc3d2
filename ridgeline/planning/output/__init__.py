"""Plans as documents: what programs read, and what tables, files and the page are made of."""
