"""Loading: batches grouped by length and padded to an edge, whoever built the data loader."""
