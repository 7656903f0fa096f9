"""What a run needs, before it begins: memory, tokens, and bytes sent and kept."""
