"""Where problems come from: files and Hub sets as checked rows, and rows as batches."""
