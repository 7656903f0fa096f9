"""Memory, tokens and bytes that a run needs, before it begins."""
