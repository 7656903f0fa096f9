"""Rush Hour: slide pieces out of the way until the target piece reaches the right edge."""
