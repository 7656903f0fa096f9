"""Everything that only a GPU can show (`python -m benchmarks.gpu`, see `__main__`)."""
