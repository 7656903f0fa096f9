"""Fine-tune language models with evolution strategies: no backpropagation, only inference.

A population of genomes (seeds that stand for weight perturbations) attempts the same problems;
their rewards move the centre of the population; the whole run is a list of seeds and coefficients.
Import from the modules themselves: this one stays empty so that importing it costs nothing.
"""

__version__ = "0.1.0"
