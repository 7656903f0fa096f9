"""Train a model on reasoning-gym's problems.

The generators of reasoning-gym.
"""
