"""What is kept and shown: the run directory, its history, its metrics, the live view."""
