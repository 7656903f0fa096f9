"""How batches of a model run: its layers, its attention or its own forward, and which is right."""
