"""Crossword: answers to cryptic clues."""
