"""Problems in memory, in batches that are a pure function of the generation."""

import math
from collections.abc import Sequence

from es_cookbook.common.errors import ConfigError, DataError, EnvError
from es_cookbook.common.terminal import plural, say
from es_cookbook.rl.data.epochs import EpochOrder
from es_cookbook.rl.problem_env import ProblemEnv, ProblemGroupBuilder
from es_cookbook.rl.types import RLDataset


class ProblemDataset(RLDataset):
    """Every problem once per epoch, in an order that follows from a seed (`EpochOrder`).

    Args:
        held_out: problems that are checked with them, and not trained on.
        option: what the user calls `problems_per_generation`.
    """

    def __init__(
        self,
        builders: Sequence[ProblemGroupBuilder],
        problems_per_generation: int,
        seed: int,
        held_out: Sequence[ProblemGroupBuilder] = (),
        option: str = "dataset.problems_per_generation",
    ) -> None:
        if not 1 <= problems_per_generation <= len(builders):
            raise ConfigError(
                f"{option} must be from 1 to {len(builders)}, the number of training problems, "
                f"found {problems_per_generation}"
            )
        self.builders = builders
        self.problems_per_generation = problems_per_generation
        self._held_out = held_out
        self._order = EpochOrder(len(builders), seed)

    def get_batch(self, generation: int) -> Sequence[ProblemGroupBuilder]:
        """The problems of one generation."""
        indices_P = self._order.batch(generation, self.problems_per_generation)
        return [self.builders[i] for i in indices_P]

    def __len__(self) -> int:
        """Number of problems."""
        return len(self.builders)

    async def validate(self, context_length: int) -> None:
        """Check every prompt's length and grade every gold answer, of held-out problems too."""
        say(f"checking {len(self.builders):,} training problems")
        for builder in (*self.builders, *self._held_out):
            env = builder.make_env()
            length = len((await env.initial_observation()).tokens_T)
            if length >= context_length:
                raise DataError(
                    f"{builder.name}: its prompt of {plural(length, 'token')} leaves no room in "
                    f"the engine's context of {plural(context_length, 'token')}; shorten the "
                    "prompt or raise engine.max_model_len"
                )
            if builder.gold is not None and isinstance(env, ProblemEnv):
                await _check_gold(builder.name, builder.gold, env)


async def _check_gold(name: str, gold: str, env: ProblemEnv) -> None:
    try:
        earned = (await env.graded(gold)).reward
    except EnvError as error:
        raise DataError(str(error)) from error
    if not math.isclose(earned, env.full_reward):
        raise DataError(
            f"{name}: its own solution earns {earned:g} of {env.full_reward:g}: {gold!r:.200}"
        )
