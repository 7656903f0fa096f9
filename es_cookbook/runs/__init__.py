"""Runs: their Config, the loop, what they open and record, and their directories."""
