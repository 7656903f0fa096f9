"""Train a model to answer briefly, beside preference pairs."""
