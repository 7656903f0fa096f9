"""Train a model to say whether it can answer.

Two prompts in separate contexts, and a reward where they agree.
"""
