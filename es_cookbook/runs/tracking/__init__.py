"""Where metrics and rollouts go: JSONL files, a live view in the terminal, Weights & Biases."""
