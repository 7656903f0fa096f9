"""Genomes x problems: who runs what and when, and the scores that come of it."""
