"""What a genome is: seeds and coefficients, never weights.

ε(seed) is a set of standard-normal tensors over the search space, a pure function of the seed (see
`es_cookbook.evolution.noise`). A genome is the centre plus Σ coefficient · ε(seed) over its terms;
σ is part of the coefficients. A step moves the centre in the same representation, so the centre of
any generation is a function of the base model and the ordered steps: the history is the checkpoint.

Two things are no sums of noise. Optimizers of small spaces (CMA-ES) specify points by coordinates,
`Offsets`. And some updates are not the plain sum of their terms (Adam, Muon): such a step has a
`Rule`, which defines in plain numbers how the update is computed from the terms.
"""

import dataclasses
import math

from es_cookbook.common.errors import ConfigError
from es_cookbook.evolution.rules import Offsets, Rule, grouped

MAX_COEFFICIENT = 3.4028234663852886e38
"""Largest float32."""
MAX_SEED = 2**63 - 1
"""Largest seed; 63 bits fit a signed 64-bit integer everywhere (torch, Triton, databases)."""


@dataclasses.dataclass(frozen=True, slots=True)
class Term:
    """coefficient · ε(seed).

    Attributes:
        seed: 0 … 2⁶³ − 1; names one noise tensor set.
        coefficient: finite as a float32, to which it is rounded where it is applied.
    """

    seed: int
    coefficient: float

    def __post_init__(self) -> None:
        if not 0 <= self.seed <= MAX_SEED:
            raise ValueError(
                f"a term's seed must be a 63-bit integer (0 to 2**63 - 1), found {self.seed}"
            )
        if not abs(self.coefficient) <= MAX_COEFFICIENT:
            raise ConfigError(
                f"a term's coefficient must be finite as a float32, found {self.coefficient} "
                f"for seed {self.seed}: lower optimizer.sigma, the learning rate or the rewards"
            )


@dataclasses.dataclass(frozen=True, slots=True)
class Genome:
    """One member of the population: the centre plus its terms. `Genome()` is the centre itself.

    Attributes:
        terms: added to its starting point, in order.
        offsets: its starting point is the base plus these; the centre if None.
    """

    terms: tuple[Term, ...] = ()
    offsets: Offsets | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """The change of the centre that an optimizer returns.

    The centre first decays towards the base, centre ← base + (1 − decay) · (centre − base), unless
    decay is 0. Then the terms are added one after the other in this order, or the rule's update is
    added.

    Attributes:
        terms: added to the centre in order; empty for a generation without signal.
        decay: anchored decay towards the base model, in [0, 1]; 1 resets to the base, exactly.
        rule: how the update is computed from the terms; None for their plain sum.
    """

    terms: tuple[Term, ...] = ()
    decay: float = 0.0
    rule: Rule | None = None

    def __post_init__(self) -> None:
        if not 0.0 <= self.decay <= 1.0:
            raise ValueError(f"a step's decay must be in [0, 1], found {self.decay}")
        if self.rule is not None:
            self.rule.group_sizes(len(self.terms))  # refuses

    @property
    def groups(self) -> list[tuple[Term, ...]]:
        """The terms in the rule's groups; one group of all of them, if any, without a rule."""
        if self.rule is None:
            return [self.terms] if self.terms else []
        return list(map(tuple, grouped(self.terms, self.rule.group_sizes(len(self.terms)))))

    @property
    def rms(self) -> float:
        """RMS of the update over the parameters, without decay, computed from plain numbers alone.

        Noise has unit variance and different seeds are independent, so for a plain sum it is
        √(Σ c²). Where a search space scales or masks noise (σ by layer, partitions), this is
        for parameters with the full noise of every term; so is a genome's σ, so their ratio holds.

        >>> Step(terms=(Term(1, 0.003), Term(2, -0.004))).rms
        0.005
        """
        coefficients = [term.coefficient for term in self.terms]
        return math.hypot(*coefficients) if self.rule is None else self.rule.rms(coefficients)

    @property
    def mean_square(self) -> float:
        """`rms` squared, which is additive over independent updates."""
        if self.rule is not None:
            return self.rms * self.rms
        return math.fsum(term.coefficient * term.coefficient for term in self.terms)
