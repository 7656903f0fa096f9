"""What a genome is: seeds and coefficients, never weights.

ε(seed) is a set of standard-normal tensors over the search space, a pure function of the seed (see
`es_cookbook.evolution.noise`). A genome is the centre plus Σ coefficient · ε(seed) over its terms;
σ lives in the coefficients. A step is what moves the centre, in the same currency, so the centre of
any generation is a function of the base model and the ordered steps: the history is the checkpoint.

Two things do not fit into sums of noise. Optimizers of small spaces (CMA-ES) name points by their
coordinates, `Offsets`. And some updates are not the plain sum of their terms (Adam, Muon): a step
then has a `Rule`, which says in plain numbers what is done with the terms.
"""

import dataclasses
import math

from es_cookbook.evolution.rules import Offsets, Rule, grouped

MAX_SEED = 2**63 - 1
"""Largest seed; 63 bits fit a signed 64-bit integer everywhere (torch, Triton, databases)."""


@dataclasses.dataclass(frozen=True, slots=True)
class Term:
    """coefficient · ε(seed).

    Attributes:
        seed: 0 … 2⁶³ − 1; names one noise tensor set.
        coefficient: finite; rounded to float32 where it is applied.
    """

    seed: int
    coefficient: float

    def __post_init__(self) -> None:
        if not 0 <= self.seed <= MAX_SEED:
            raise ValueError(
                f"a term's seed must be a 63-bit integer (0 to 2**63 - 1), found {self.seed}"
            )
        if not math.isfinite(self.coefficient):
            raise ValueError(
                f"a term's coefficient must be finite, found {self.coefficient} "
                f"for seed {self.seed}"
            )


@dataclasses.dataclass(frozen=True, slots=True)
class Genome:
    """One member of the population: the centre plus its terms. `Genome()` is the centre itself.

    Attributes:
        terms: what it adds to where it begins, in order.
        offsets: where it begins, if not at the centre: the base plus these.
    """

    terms: tuple[Term, ...] = ()
    offsets: Offsets | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """What an optimizer returns: how the centre moves.

    The centre first decays towards the base, centre ← base + (1 − decay) · (centre − base), unless
    decay is 0, and then gains its terms one after the other in this order, or what the rule makes
    of them.

    Attributes:
        terms: added to the centre in order; empty for a generation without signal.
        decay: anchored decay towards the base model, in [0, 1]; 1 is back to the base, exactly.
        rule: how the terms become the update; None for their plain sum.
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
        """The terms as the rule takes them; all of them together, if any, without a rule."""
        if self.rule is None:
            return [self.terms] if self.terms else []
        return list(map(tuple, grouped(self.terms, self.rule.group_sizes(len(self.terms)))))

    @property
    def rms(self) -> float:
        """RMS of the update over the parameters, decay not counted, from plain numbers alone.

        Noise has unit variance and different seeds are independent, so for a plain sum it is
        √(Σ c²). Where a search space scales or masks noise (σ by layer, density, blocks), that is
        for parameters that have all of every term; a genome's σ is too, so their ratio holds.

        >>> Step(terms=(Term(1, 0.003), Term(2, -0.004))).rms
        0.005
        """
        coefficients = [term.coefficient for term in self.terms]
        return math.hypot(*coefficients) if self.rule is None else self.rule.rms(coefficients)

    @property
    def mean_square(self) -> float:
        """`rms` squared: such add up over independent updates."""
        if self.rule is not None:
            return self.rms**2
        return math.fsum(term.coefficient**2 for term in self.terms)
