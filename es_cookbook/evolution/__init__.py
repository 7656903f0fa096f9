"""Genomes, steps and the centre, as seeds and coefficients, never weights."""
