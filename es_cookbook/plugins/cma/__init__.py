"""CMA-ES and its separable form, and the small space that they are for: singular values."""
