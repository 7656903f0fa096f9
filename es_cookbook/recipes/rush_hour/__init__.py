"""Train a model to solve Rush Hour.

A simulator as judge.
"""
