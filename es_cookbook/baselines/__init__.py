"""Gradient training on the same data and Envs, to begin from and to compare with."""
