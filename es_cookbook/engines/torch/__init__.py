"""The PyTorch engine: the whole population in one batch, in this process."""
