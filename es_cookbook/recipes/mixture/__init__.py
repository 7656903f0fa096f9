"""Train on several data sets at once.

Several data sets, curricula, replay.
"""
