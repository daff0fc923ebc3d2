"""Plans against published measurements: points read, predicted, and their errors by source."""
