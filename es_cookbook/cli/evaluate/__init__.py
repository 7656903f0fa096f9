"""What a centre or a model is worth on held-out problems, with intervals and comparisons."""
