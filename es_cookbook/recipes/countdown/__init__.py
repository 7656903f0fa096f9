"""Countdown: combine numbers to reach a target. The recipe to start with."""
