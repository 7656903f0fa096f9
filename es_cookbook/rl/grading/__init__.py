"""Grading outside of the event loop: worker processes, and a sandbox for untrusted code."""
