"""Models of quantised weights: their files, their search spaces, and QES."""
