"""Train chains of thought from which alone answers can be read."""
