"""Several data sets in one run: a curriculum, an easy pool, a filter and a replay buffer."""
