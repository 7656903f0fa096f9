"""CMA-ES and its separable form, for small explicit spaces."""
