"""Train a model to search a corpus.

Two searches of a corpus, then an answer.
"""
