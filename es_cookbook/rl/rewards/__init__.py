"""What answers earn: pure functions of text, fast and safe."""
