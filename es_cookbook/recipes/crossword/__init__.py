"""Train a model to solve cryptic clues.

A shaped reward that cannot be farmed.
"""
