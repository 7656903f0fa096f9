"""Several data sets in one run: shares, curriculum, filter and replay buffer."""
