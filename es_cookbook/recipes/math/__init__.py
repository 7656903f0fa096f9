"""Train a model to solve mathematical problems."""
