"""What a run finds by itself before its first generation: sizes, and numbers that are `auto`."""
