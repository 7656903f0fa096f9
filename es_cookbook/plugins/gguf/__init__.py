"""Models in GGUF, the format of llama.cpp: reading what a stranger wrote, and converting it."""
