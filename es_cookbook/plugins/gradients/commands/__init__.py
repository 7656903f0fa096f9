"""Training by gradients on the problems of a recipe, or rows of your own."""
