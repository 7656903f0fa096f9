"""The engine on llama.cpp: trains a GGUF file where it runs, in its own format."""
