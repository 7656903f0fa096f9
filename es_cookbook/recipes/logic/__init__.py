"""Train a model on reasoning-gym's problems."""
