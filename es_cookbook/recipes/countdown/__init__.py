"""Train a model to solve Countdown."""
