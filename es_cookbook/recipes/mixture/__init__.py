"""Train on several data sets at once."""
