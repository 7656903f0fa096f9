"""The vLLM engine: genomes as LoRA slots, written from seeds inside vLLM's workers."""
