"""A run's centre as files that other programs load."""
