"""Regularisers: weighted terms of the objective with separate problems.

A regulariser adds problems to every batch, the same for all genomes. A genome's total
score is its score on the batch plus weight times its mean reward on these, each minus the mean over
the genomes (`evolution.fitness.Added`). So the offset of a regulariser's reward does not matter: a
value that all genomes share, such as the centre's KL, has no effect.

Its problems come after the batch's own, whose sampling seeds stay what they were: with weight 0 a
run is the same to the bit, and the regulariser's metrics are measured all the same. They are a pure
function of the generation and the batch, so a resumed run needs no record of them.

Each that is registered is an option of a run by its name. Left out: an objective over the attempts
at their problems, which count by their mean reward.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

import chz

from es_cookbook.common.checks import check_types, in_range
from es_cookbook.common.registry import Registered
from es_cookbook.rl.types import EnvGroupBuilder, Tokenizer

REGULARISER_NAMES = Registered("regularisers")
"""Names on the command line."""
AddedProblems: TypeAlias = Callable[[int, Sequence[EnvGroupBuilder]], Sequence[EnvGroupBuilder]]
"""(generation, its batch `env_group_builders_P`) -> a regulariser's own problems."""


@chz.chz
class Regulariser(ABC):
    """Builds the problems of one regulariser."""

    _types = chz.validate(check_types)

    weight: float = chz.field(doc="weight of its mean reward beside the batch's; 0: measure only")
    problems_per_generation: int = chz.field(default=8, doc="its problems in a batch, at most")

    _weight = in_range("weight", at_least=0)
    _problems_per_generation = in_range("problems_per_generation", at_least=1)

    def check(self) -> None:
        """Refuse, before a model is loaded, a source that is not there; by default nothing.

        Raises:
            DataError: Why.
        """
        return

    def trained_on(self, tokenizer: Tokenizer) -> Iterable[tuple[int, ...]]:
        """Return digests of problems whose right answers it uses, as for a training set."""
        return ()

    @abstractmethod
    def __call__(self, tokenizer: Tokenizer, context_length: int, run_seed: int) -> AddedProblems:
        """Load and check rows, whose order follows from `run_seed`.

        Raises:
            DataError: A row that cannot be used; names the file and the line.
        """

    def held_out(
        self,
        tokenizer: Tokenizer,
        context_length: int,
        run_seed: int,
        test_P: Sequence[EnvGroupBuilder],
    ) -> Sequence[EnvGroupBuilder]:
        """Return its problems that are measured with the held-out ones; none by default."""
        return ()
