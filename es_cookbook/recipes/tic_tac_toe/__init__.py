"""Train a model by games of its genomes with each other."""
