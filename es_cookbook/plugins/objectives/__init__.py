"""Objectives of several rewards, and such that change over a run."""
