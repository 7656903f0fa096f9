"""Train a model to guess numbers by hints."""
