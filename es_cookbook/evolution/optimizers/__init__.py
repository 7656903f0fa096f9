"""Ask for a population, tell its fitness: a file an algorithm."""
