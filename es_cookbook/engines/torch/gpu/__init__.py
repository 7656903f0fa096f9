"""What the torch engine does on GPUs alone."""
