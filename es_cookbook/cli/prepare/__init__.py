"""What a run needs before it begins: answers of another model to learn from, a quantised base."""
