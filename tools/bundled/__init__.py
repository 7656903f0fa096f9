"""One module a recipe."""
