"""Train a model to solve cryptic clues."""
