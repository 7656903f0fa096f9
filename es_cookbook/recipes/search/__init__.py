"""Train a model to search a corpus."""
