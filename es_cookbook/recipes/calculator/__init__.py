"""Compute with a pocket calculator."""
