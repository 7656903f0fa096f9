"""Train a chat model to follow instructions.

Instruct models: sums, instructions that a program checks, brief answers, JSON.
"""
