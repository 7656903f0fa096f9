"""Merging of trained adapters: a search space of their coefficients."""
