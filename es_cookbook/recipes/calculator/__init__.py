"""Train a model to use a calculator."""
