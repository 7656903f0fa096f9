"""What a genome is and how it moves: seeds and coefficients, never weights."""
