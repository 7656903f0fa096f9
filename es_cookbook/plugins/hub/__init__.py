"""Pushes to the Hugging Face Hub."""
