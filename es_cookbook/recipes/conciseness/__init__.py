"""Train a model to answer briefly.

A reward of length, and what it costs.
"""
