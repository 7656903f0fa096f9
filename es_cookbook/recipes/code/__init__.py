"""Train a model to write code that passes tests."""
