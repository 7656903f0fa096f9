"""Train a model to add numbers.

Ability that is learned, beside supervised training and a policy gradient.
"""
