"""Train a model to answer briefly, beside preference pairs.

Preference pairs that keep what a task would forget.
"""
