"""Train thoughts from which alone answers can be read.

Thoughts from which alone an answer can be read.
"""
