"""Train a model to answer briefly."""
