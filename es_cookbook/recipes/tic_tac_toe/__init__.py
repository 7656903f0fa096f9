"""Train a model by games of its genomes with each other.

Genomes that play each other.
"""
