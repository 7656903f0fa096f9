"""One module per recipe."""
