"""Train a model to add numbers."""
