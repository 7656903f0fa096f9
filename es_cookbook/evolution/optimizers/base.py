"""The interface of optimizers: `ask` returns a population, `tell` takes its fitness.

Both work on seeds and coefficients, never weights, so an optimizer is small, needs no model, and
is tested on literal arrays. All of them maximise.

To add one: subclass `Optimizer` in a separate module, write its builder beside it, and add a name
to `OPTIMIZER_NAMES`.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import ClassVar, Literal, Self, TypeAlias

import chz
from typing_extensions import override

from es_cookbook.common.checks import LEAST, MOST, check_types
from es_cookbook.common.errors import ConfigError
from es_cookbook.common.names import Names
from es_cookbook.common.registry import Registered
from es_cookbook.evolution.fitness import Floats
from es_cookbook.evolution.genome import Genome, Step, Term
from es_cookbook.evolution.schedules import Constant, Schedule
from es_cookbook.evolution.spaces.base import SearchSpace, SearchSpaceBuilder

OPTIMIZER_NAMES = Registered("optimizers")
"""Names on the command line."""

AUTO = "auto"
Auto: TypeAlias = float | Literal["auto"]
"""A number, or one that a run finds before its first generation (`population.step_sizes`)."""


class Optimizer(ABC):
    """A way of moving the centre (or a population) towards fitness."""

    @abstractmethod
    def ask(self, generation: int) -> list[Genome]:
        """Return the population of a generation, `genomes_G`.

        A pure function of the run seed, the generation and earlier calls of `tell`.
        """

    records_scores: bool = False
    """Whether `tell` needs the scores again when the run is resumed: then the history has them."""
    divides_fitness: bool = False
    """Whether to use fitness in units of its RMS so far: for a learning rate that was found."""
    max_terms: int = 1
    """Most terms that a genome will have."""

    @abstractmethod
    def tell(
        self,
        generation: int,
        genomes_G: Sequence[Genome],
        scores_P_G: Floats | None,
        fitness_G: Floats,
    ) -> Step:
        """Return the step of the centre, given the fitness of the genomes that `ask` returned.

        Args:
            generation: the generation that was asked for.
            genomes_G: its genomes.
            scores_P_G: their scores on the batch's problems (by the objective, and without what
                regularisers add); NaN where a genome has none. None while a resumed run is told
                its history again, unless `records_scores`.
            fitness_G: one number per genome, more is better; NaN for a genome to leave out.

        Returns:
            The step; without terms when the fitness carries no signal.
        """

    @abstractmethod
    def sigma(self, generation: int) -> float:
        """Return the standard deviation of the generation's perturbations, per parameter.

        It is that of the generation asked last, until the next one is asked; schedules know others.
        """

    def learning_rate(self, generation: int) -> float | None:
        """Return the learning rate of the generation's step; None if the optimizer has none."""
        return None

    def begin_after(self, steps: Sequence[Step]) -> None:  # noqa: B027 - most only add to the centre
        """Begin as a fork, before the first `ask`: after another run's steps.

        Otherwise the centre begins at the base. Optimizers that only add to the centre ignore it.

        Raises:
            ConfigError: It cannot begin there.
        """

    def metrics(self) -> Mapping[str, float]:
        """Return metrics of the generation that was told last, by name: `genetic/...`."""
        return {}


@chz.chz
class OptimizerBuilder(ABC):
    """Builds an optimizer for one run."""

    _types = chz.validate(check_types)

    finds: ClassVar[Collection[str]] = ()
    """Fields that may be `AUTO`."""
    not_carried: ClassVar[Collection[str]] = ()
    """Fields that are not taken from a recipe's settings of `es`."""

    population_size: int = chz.field(default=30, doc="genomes per generation")

    @chz.validate
    def _unsettled(self) -> None:
        for name in self.unsettled:
            if name not in self.finds:
                raise ConfigError(
                    f"{name} cannot be auto for {type(self).__name__} (it finds "
                    f"{', '.join(self.finds) or 'nothing'}): give it a number"
                )

    @property
    def asks_ahead(self) -> bool:
        """Whether `ask` does not depend on earlier calls of `tell`: it may be called early."""
        return False

    @property
    def unsettled(self) -> list[str]:
        """Fields that are `AUTO`."""
        return [name for name in chz.chz_fields(self) if getattr(self, name) == AUTO]

    def settled(self, found: Mapping[str, object]) -> Self:
        """Return a copy with the numbers that were found in place of `AUTO`.

        Raises:
            ConfigError: One of them was not.
        """
        for name in self.unsettled:
            if name not in found:
                raise ConfigError(
                    f"optimizer.{name}=auto is found before the first generation of a run, and "
                    "this one began without it: give a number"
                )
        return chz.replace(self, **{name: found[name] for name in self.unsettled})

    def rate_factor(self, generation: int, num_generations: int) -> float:
        """Return the factor on the learning rate in a generation."""
        return 1.0

    @classmethod
    def carried(cls, es: Mapping[str, object]) -> dict[str, object]:
        """Return this optimizer's fields that correspond to a recipe's fields for `es`.

        Values that are `AUTO` there are found for this one, too.
        """
        names = chz.chz_fields(cls).keys() - set(cls.not_carried)
        return {name: value for name, value in es.items() if name in names}

    @classmethod
    def carried_over(cls, es: Mapping[str, object]) -> dict[str, object]:
        """Return the same, without settings that this optimizer cannot find."""
        return {
            name: value
            for name, value in cls.carried(es).items()
            if value != AUTO or name in cls.finds
        }

    def check_run(self, search_space: SearchSpaceBuilder, num_generations: int) -> None:  # noqa: B027 - most search all
        """Refuse a search space or a length that the optimizer cannot use.

        Raises:
            ConfigError: Names those that it can use, as options.
        """

    def check(self, model_name: str, search_space: SearchSpaceBuilder) -> None:  # noqa: B027 - most need no package
        """Check, before a model is loaded, packages and what the model's header says.

        Raises:
            ConfigError: A package is missing, or the search space over the model is too large.
        """

    @abstractmethod
    def __call__(self, *, run_seed: int, num_generations: int, space: SearchSpace) -> Optimizer:
        """Build it.

        Args:
            run_seed: every genome's seeds derive from it.
            num_generations: the length of the run, which schedules need.
            space: search space of its genomes.

        Raises:
            ConfigError: Fields that cannot work in a run of this length or in this space.
        """


class OptimizerNames(Names):
    """Optimizers by name; the chosen one adopts the recipe's settings of `es` as far as it can.

    Args:
        settings: fields by an optimizer's name; those of `es` are the recipe's, others win for one.
    """

    def __init__(self, settings: Mapping[str, Mapping[str, object]]) -> None:
        super().__init__(OPTIMIZER_NAMES, default="es", settings=settings)
        self._es = settings["es"]

    @override
    def settings_of(self, part: Callable[..., object], name: str | None) -> Mapping[str, object]:
        own = super().settings_of(part, name)
        if isinstance(part, type) and issubclass(part, OptimizerBuilder):
            return {**part.carried_over(self._es), **own}
        return own


def refuse_zero_sigma(sigma: Auto, schedule: Schedule, num_generations: int) -> None:
    """Check a scheduled sigma over a whole run, before it begins.

    Raises:
        ConfigError: It reaches 0, or what cannot be multiplied, within the run.
    """
    start = 1.0 if sigma == AUTO else number(sigma)
    for generation in range(0 if schedule == Constant() else num_generations):
        if not LEAST <= (found := start * schedule(generation, num_generations)) <= MOST:
            raise ConfigError(
                f"optimizer.sigma_schedule reaches {found:g} at generation {generation} of "
                f"{num_generations}; sigma must stay above 0, from {LEAST:g} to {MOST:g}"
            )


def tied_fraction(genomes_G: Sequence[Genome], fitness_G: Floats) -> float:
    """Return the share of mirrored pairs whose twins have equal fitness: they carry no signal.

    Pairs with a lost twin are not counted. 0 when there are no pairs.
    """
    fitness_of = dict(zip(genomes_G, fitness_G.tolist(), strict=True))
    ties = [
        fitness == fitness_of[twin]
        for genome, fitness in fitness_of.items()
        if genome.terms and (twin := mirrored(genome)) in fitness_of
        if math.isfinite(fitness) and math.isfinite(fitness_of[twin])
    ]
    return sum(ties) / len(ties) if ties else 0.0


def mirrored(genome: Genome) -> Genome:
    """Return the antithetic twin: the same seeds with every coefficient negated."""
    return Genome(tuple(Term(term.seed, -term.coefficient) for term in genome.terms))


def number(value: Auto) -> float:
    """Return the number of an `Auto` field, once a run has found it.

    Raises:
        ConfigError: It is still to be found.
    """
    if isinstance(value, str):
        raise ConfigError("only a run finds what is auto: give the optimizer a number")
    return value
