"""Servers that are asked over HTTP, and how far each is trusted: time and size have limits."""
