"""Train a model to solve Rush Hour."""
