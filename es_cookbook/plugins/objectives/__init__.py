"""Objectives and rewards made of several rewards, adjusted by length, or changing over a run."""
