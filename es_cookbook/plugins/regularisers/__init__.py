"""Regularisers: KL to the base, and preference pairs."""
