"""Train a model to use a calculator.

A tool.
"""
