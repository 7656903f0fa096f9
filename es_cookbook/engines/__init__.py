"""Where genomes run: what holds the model, hosts genomes, samples and scores tokens."""
