"""Merge trained adapters by what the merge earns.

Adapters of a chat model, each trained on another task: a search over their coefficients.
"""
