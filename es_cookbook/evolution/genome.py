"""Genomes: seeds and coefficients, never weights. Steps: the same, and a rule.

ε(seed) is a set of standard-normal tensors over the search space, a pure function of the seed (see
`es_cookbook.evolution.noise`). A genome is the centre plus Σ coefficient · ε(seed) over its terms;
σ is part of the coefficients. A step moves the centre in the same representation, so the centre of
any generation is a function of the base model and the ordered steps: the history is the checkpoint.

Two cases are not sums of noise. Optimizers of small spaces (CMA-ES) specify points by coordinates,
`Offsets`. And some updates are not the plain sum of their terms (Adam, Muon): such a step has a
`Rule`, which defines in plain numbers how the update is computed from the terms. It is recorded in
the history, sent to engines and replayed like the terms; the exact arithmetic is in
`es_cookbook.evolution.centre`.

The idea of rules: optimizer state (Adam's moments, Muon's momentum) is never stored as tensors. A
step repeats the terms of the last generations, `counts` of each, oldest first, and the moments are
recomputed from them. So the next centre is a function of the step and the centre before it, a
snapshot holds the centre alone, and replays, forks and exports do not depend on optimizers. The
cost is the noise of the whole window in every step.
"""

import base64
import dataclasses
import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from es_cookbook.common.errors import ConfigError

_T = TypeVar("_T")
_FLOAT32 = np.dtype("<f4")
_LARGEST = 1e100
"""Largest number of a rule in a history, so that sums of squares stay finite."""
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
class Offsets:
    """A point of the search space by its coordinates, relative to the base.

    Parameter after parameter in the space's order, each in C order.

    Attributes:
        data: float32, little-endian; bytes, so that genomes stay hashable and cannot be written.
    """

    data: bytes

    def __post_init__(self) -> None:
        if len(self.data) % _FLOAT32.itemsize:
            raise ValueError(f"offsets are float32 numbers, found {len(self.data)} bytes")

    @staticmethod
    def of(values: NDArray[np.floating]) -> "Offsets":
        """Round these coordinates to float32.

        >>> Offsets.of(np.array([0.5, -1.0])).array
        array([ 0.5, -1. ], dtype=float32)
        """
        return Offsets(np.ascontiguousarray(values, _FLOAT32).tobytes())

    @property
    def array(self) -> NDArray[np.float32]:
        """One axis, not writable."""
        return np.frombuffer(self.data, _FLOAT32)


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
class Rule(ABC):
    """Computes an update from terms. Fields are ints, floats, tuples of them, or `Offsets`."""

    @abstractmethod
    def group_sizes(self, num_terms: int) -> Sequence[int]:
        """Return the sizes of the groups of consecutive terms that a step's terms are divided into.

        Raises:
            ValueError: The rule is for another number of terms.
        """

    @abstractmethod
    def rms(self, coefficients_S: Sequence[float]) -> float:
        """Return the RMS of the last generation's sum without rounding."""


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


@dataclasses.dataclass(frozen=True, slots=True)
class AdamRule(Rule):
    """Adam's update from the gradients of the last generations (Kingma and Ba, arXiv:1412.6980).

    Element by element, with g_j the sum of generation j's terms,

        W <- W + rate · m / (√v + epsilon),   m = Σ_j first_j · g_j,   v = Σ_j second_j · g_j²

    Attributes:
        counts: terms of each generation, oldest first.
        first: weight of each generation in m.
        second: weight of each generation in v.
        rate: learning rate.
        epsilon: above 0.
    """

    counts: tuple[int, ...]
    first: tuple[float, ...]
    second: tuple[float, ...]
    rate: float
    epsilon: float

    def __post_init__(self) -> None:
        if not (len(self.counts) == len(self.first) == len(self.second)):
            raise ValueError("an Adam step needs as many weights as generations")
        if min((*self.counts, *self.second), default=0) < 0 or not self.epsilon > 0:
            raise ValueError(
                "an Adam step's counts and second must not be negative, and epsilon above 0"
            )

    def group_sizes(self, num_terms: int) -> Sequence[int]:
        return _all_of(self.counts, num_terms)

    def rms(self, coefficients_S: Sequence[float]) -> float:
        """Approximate it with the mean of v for all its elements."""
        groups = grouped(coefficients_S, self.counts)
        squares = [math.fsum(c * c for c in group) for group in groups]
        m = math.fsum(a * a * square for a, square in zip(self.first, squares, strict=True))
        v = math.fsum(b * square for b, square in zip(self.second, squares, strict=True))
        return abs(self.rate) * math.sqrt(m) / (math.sqrt(v) + self.epsilon)


@dataclasses.dataclass(frozen=True, slots=True)
class MuonRule(Rule):
    """The terms' sum with all singular values made equal, matrix by matrix (Muon).

    Keller Jordan's Muon (https://kellerjordan.github.io/posts/muon/): a Newton-Schulz iteration
    brings the singular values of G = Σ c ε to about 1 and keeps its singular vectors. The result is
    scaled to the RMS of the matrix's own plain sum, so learning rates keep their meaning for any
    rank of the noise, factors on σ and blocks. To parameters other than matrices the
    plain sum is added.

    Attributes:
        scale: RMS of the plain sum, √(Σ c²), where nothing is a factor on it.
        iterations: number of Newton–Schulz iterations.
    """

    scale: float
    iterations: int

    def __post_init__(self) -> None:
        if not 0 <= self.scale < math.inf or not 1 <= self.iterations <= 100:
            raise ValueError("a Muon step's scale must be 0 or more, and iterations 1 to 100")

    def group_sizes(self, num_terms: int) -> Sequence[int]:
        return (num_terms,)

    def rms(self, coefficients_S: Sequence[float]) -> float:
        return self.scale


@dataclasses.dataclass(frozen=True, slots=True)
class OffsetsRule(Rule):
    """Sets the centre to the base plus these offsets, wherever it was.

    Attributes:
        offsets: offsets of the whole search space.
        moved: RMS of the difference from the previous centre.
    """

    offsets: Offsets
    moved: float

    def group_sizes(self, num_terms: int) -> Sequence[int]:
        return _all_of((), num_terms)

    def rms(self, coefficients_S: Sequence[float]) -> float:
        return self.moved


@dataclasses.dataclass(frozen=True, slots=True)
class ErrorFeedbackRule(Rule):
    """A step rounded to whole numbers, with feedback of earlier rounding errors (QES).

    Element by element, e = 0 before the first of the generations j, oldest first,

        s = residual_decay · e + Σ_t weight_t · change_t,   d = rint(s),   e = s - d

    with change_t the change by term t alone, and then W <- clip(W + d) with the last d.

    Attributes:
        counts: terms of each generation, oldest first; each as it was tried.
        weights: weight of each term.
        residual_decay: share of the error that is kept for the next generation.
        highest: W stays in 0 ... highest.
    """

    counts: tuple[int, ...]
    weights: tuple[float, ...]
    residual_decay: float
    highest: int

    def __post_init__(self) -> None:
        if min(self.counts, default=0) < 0 or sum(self.counts) != len(self.weights):
            raise ValueError("an error feedback step needs a weight for each term it counts")
        if not 0 <= self.residual_decay < 1 or self.highest < 1:
            raise ValueError("an error feedback step needs a decay in [0, 1) and a range")

    def group_sizes(self, num_terms: int) -> Sequence[int]:
        return _all_of((1,) * len(self.weights), num_terms)

    def rms(self, coefficients_S: Sequence[float]) -> float:
        """Return the RMS of the last generation's sum without rounding."""
        newest = self.counts[-1] if self.counts else 0
        pairs = list(zip(self.weights, coefficients_S, strict=True))[len(self.weights) - newest :]
        return math.hypot(*(weight * coefficient for weight, coefficient in pairs))


RULES: Mapping[str, type[Rule]] = {
    "adam": AdamRule,
    "muon": MuonRule,
    "offsets": OffsetsRule,
    "error_feedback": ErrorFeedbackRule,
}
"""Name in the history -> rule."""


def rule_to_plain(rule: Rule) -> Mapping[str, object]:
    """Return a rule as JSON values: its name as "kind", and its fields; offsets in base64."""
    (kind,) = (name for name, of_kind in RULES.items() if of_kind is type(rule))
    values = {field.name: getattr(rule, field.name) for field in dataclasses.fields(rule)}
    return {"kind": kind} | {
        name: base64.b64encode(value.data).decode() if isinstance(value, Offsets) else value
        for name, value in values.items()
    }


def rule_from_plain(plain: Mapping[str, object]) -> Rule:
    """Read a rule that `rule_to_plain` wrote.

    Raises:
        ValueError: An unknown kind, or fields that are not those of the rule.
    """
    kind = plain.get("kind")
    if not isinstance(kind, str) or kind not in RULES:
        raise ValueError(f"a rule's kind must be one of {', '.join(RULES)}, found {kind!r:.60}")
    rule = RULES[kind]
    types = {field.name: cast(object, field.type) for field in dataclasses.fields(rule)}
    if types.keys() != plain.keys() - {"kind"}:
        raise ValueError(f"a rule of kind {kind} has the fields {', '.join(types)}")
    return rule(**{name: _value(name, of_type, plain[name]) for name, of_type in types.items()})


def _value(name: str, of_type: object, found: object) -> object:
    """Convert a JSON value to a field's value."""
    if of_type is Offsets and isinstance(found, str):
        return Offsets(base64.b64decode(found, validate=True))
    is_list = isinstance(found, list)
    values = cast("list[object]", found) if is_list else [found]
    kind = _ELEMENTS.get(of_type) if is_list else of_type
    if kind in (int, float) and all(
        type(value) is kind and abs(cast(float, value)) <= _LARGEST for value in values
    ):
        return tuple(values) if is_list else found
    raise ValueError(f"a rule's {name} must be {of_type}, found {found!r:.60}")


_ELEMENTS: Mapping[object, type] = {tuple[int, ...]: int, tuple[float, ...]: float}
"""Type of a rule's field -> that of the elements of its list."""


def grouped(items: Sequence[_T], counts: Sequence[int]) -> list[Sequence[_T]]:
    """Return consecutive groups of these sizes.

    >>> grouped("abc", (1, 2))
    ['a', 'bc']
    """
    ends = itertools.accumulate(counts, initial=0)
    return [items[first:last] for first, last in itertools.pairwise(ends)]


def _all_of(counts: Sequence[int], num_terms: int) -> Sequence[int]:
    if sum(counts) != num_terms:
        raise ValueError(f"a rule about {sum(counts)} terms cannot have {num_terms}")
    return counts
