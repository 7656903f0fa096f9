"""Reinforcement learning: Envs, datasets, rewards and rollouts."""
