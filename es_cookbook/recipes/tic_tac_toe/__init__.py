"""Tic-tac-toe: genomes play each other, and their results are their fitness."""
