"""Train a model to write code that passes tests.

Model-written programs, run in a sandbox.
"""
