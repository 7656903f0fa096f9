"""Ask for a population, tell its fitness: one file per algorithm."""
