"""Problems in memory, in batches that are a pure function of the generation."""

import math
from collections.abc import Sequence

from es_cookbook.common.errors import ConfigError, DataError
from es_cookbook.common.terminal import plural, say
from es_cookbook.rl.data.epochs import EpochOrder
from es_cookbook.rl.problem_env import ProblemGroupBuilder
from es_cookbook.rl.types import RLDataset


class ProblemDataset(RLDataset):
    """Every problem once per epoch, in an order that follows from a seed (`EpochOrder`)."""

    def __init__(
        self, builders: Sequence[ProblemGroupBuilder], problems_per_generation: int, seed: int
    ) -> None:
        if not 1 <= problems_per_generation <= len(builders):
            raise ConfigError(
                f"dataset.problems_per_generation must be from 1 to {len(builders)}, the number of "
                f"training problems, found {problems_per_generation}"
            )
        self.builders = builders
        self.problems_per_generation = problems_per_generation
        self._order = EpochOrder(len(builders), seed)

    def get_batch(self, generation: int) -> Sequence[ProblemGroupBuilder]:
        """The problems of one generation."""
        indices_P = self._order.batch(generation, self.problems_per_generation)
        return [self.builders[i] for i in indices_P]

    def __len__(self) -> int:
        """Number of problems."""
        return len(self.builders)

    async def validate(self, context_length: int) -> None:
        """Check every prompt's length and grade every gold answer."""
        say(f"checking {len(self.builders):,} training problems")
        for builder in self.builders:
            length = len(builder.make_env().observation.tokens_T)
            if length >= context_length:
                raise DataError(
                    f"{builder.name}: its prompt of {plural(length, 'token')} leaves no room in "
                    f"the engine's context of {plural(context_length, 'token')}; shorten the "
                    "prompt or raise engine.max_model_len"
                )
        validate_gold(self.builders)


def validate_gold(builders: Sequence[ProblemGroupBuilder]) -> None:
    """Check that every gold answer earns its problem's full reward.

    Raises:
        DataError: A gold answer that does not earn the full reward; names the problem.
    """
    for builder in builders:
        if builder.gold is None:
            continue
        env = builder.make_env()
        earned = env.grade(builder.gold).reward
        if not math.isclose(earned, env.full_reward):
            raise DataError(
                f"{builder.name}: its own solution earns {earned:g} of {env.full_reward:g}: "
                f"{builder.gold!r}"
            )
