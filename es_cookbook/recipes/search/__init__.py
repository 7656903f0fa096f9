"""Find answers in a corpus."""
