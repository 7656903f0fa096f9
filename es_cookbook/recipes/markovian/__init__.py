"""Train thoughts from which alone answers can be read."""
