"""A genetic algorithm over seeds."""
