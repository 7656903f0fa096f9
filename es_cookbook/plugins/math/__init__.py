"""Answers that are mathematics: a reward that compares formulas, and rows of public sets."""
