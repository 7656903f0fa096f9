"""Train a chat model to do what it is told.

Instruct models: sums, instructions that a program checks, brief answers, JSON.
"""
