"""The directory of a run: what is in it, who holds it, and whom its files may name."""
