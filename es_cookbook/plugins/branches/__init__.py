"""Forks and rewinds of recorded runs."""
