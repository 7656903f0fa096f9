"""Train a model to solve Countdown.

The main job; a warm start; ESSA from start to end.
"""
