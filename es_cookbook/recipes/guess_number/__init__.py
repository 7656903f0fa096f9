"""Guess a number by hints."""
