"""Genomes x problems: scheduling of rollouts, and the scores that result."""
