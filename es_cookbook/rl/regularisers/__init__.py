"""What else a run wants of its genomes: problems of their own, with a weight."""
