"""ε(seed): noise that is a pure function of (seed, parameter name, element).

Element i, in C order over the Hugging Face parameter's own name and shape, comes from a
counter-based generator (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"), so any
element can be generated alone, in any order, on any device, and a shard generates just its part.
Nothing is stored and nothing is drawn: the seed is the noise.

- words (`philox`): Philox4x64-10 keyed by (seed, hash of the name), in blocks of 4 x 64 bits;
- gaussian: a block is 16 lanes of 16 bits, little end first; a lane indexes a table of normal
  quantiles (`philox`);
- rademacher: a block is 256 bits, little end first; a set bit is +1, a clear bit is -1.

Left out: exact normal tails. The largest gaussian value is about 4.32, the limit of sixteen bits.
"""

from es_cookbook.evolution.noise.tensors import NoiseKind, noise, noise_of_seeds, noise_range

__all__ = ["NoiseKind", "noise", "noise_of_seeds", "noise_range"]
