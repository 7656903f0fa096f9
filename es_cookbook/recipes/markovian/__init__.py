"""Markovian training: a chain of thought that must hold all that the answer needs."""
