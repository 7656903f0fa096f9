"""Train a model to guess numbers by hints.

Chats of many turns.
"""
