"""Reward functions: pure functions of text, fast and safe on any input."""
