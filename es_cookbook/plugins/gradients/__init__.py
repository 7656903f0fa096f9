"""Gradient training on the same data and Envs, as a starting point and for comparison."""
