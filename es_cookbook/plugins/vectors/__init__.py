"""Vectors beside the weights as search spaces: soft prompts and steering vectors."""
