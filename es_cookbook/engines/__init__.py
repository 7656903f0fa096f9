"""Engines, which hold the model, host genomes, sample and score tokens."""
