"""Runs as models of inspect-ai."""
