"""Problems in memory, in batches that are a pure function of the generation."""

import math
import random
import traceback
from collections.abc import Sequence
from typing import Generic, TypeVar

from typing_extensions import override

from es_cookbook.common.errors import ConfigError, DataError, EnvError, own_frames
from es_cookbook.common.seeds import derive_seed
from es_cookbook.common.terminal import plural, say
from es_cookbook.rl.messages.message_env import MessageEnv
from es_cookbook.rl.messages.script import Script
from es_cookbook.rl.problem_env import ProblemEnv, ProblemGroupBuilder
from es_cookbook.rl.rollouts import run_rollout
from es_cookbook.rl.types import EnvGroupBuilder, RLDataset


class EpochOrder:
    """Every index once per epoch, each epoch in an order of its own.

    Epochs follow each other without a gap, so a batch may end one and begin the next.
    """

    def __init__(self, size: int, seed: int) -> None:
        self._size = size
        self._seed = seed
        self._epoch = -1  # whose order is kept, so that a batch shuffles once at most
        self._order: list[int] = []

    def batch(self, generation: int, batch_size: int) -> list[int]:
        """The indices of one generation's batch."""
        start = generation * batch_size
        return [self._at(position) for position in range(start, start + batch_size)]

    def _at(self, position: int) -> int:
        """The index at a position in the endless sequence of epochs."""
        epoch, offset = divmod(position, self._size)
        if epoch != self._epoch:
            self._epoch = epoch
            self._order = list(range(self._size))
            random.Random(derive_seed(self._seed, "epoch", epoch)).shuffle(self._order)
        return self._order[offset]


_Builder = TypeVar("_Builder", bound=EnvGroupBuilder)


class EpochDataset(RLDataset, Generic[_Builder]):
    """Every problem once per epoch, in an order that follows from a seed (`EpochOrder`)."""

    def __init__(
        self, builders: Sequence[_Builder], problems_per_generation: int, seed: int
    ) -> None:
        if not 1 <= problems_per_generation <= len(builders):
            raise ConfigError(
                f"dataset.problems_per_generation must be from 1 to {len(builders)}, the number of "
                f"training problems, found {problems_per_generation}"
            )
        self.builders = builders
        self.problems_per_generation = problems_per_generation
        self._order = EpochOrder(len(builders), seed)

    def get_batch(self, generation: int) -> Sequence[_Builder]:
        indices_P = self._order.batch(generation, self.problems_per_generation)
        return [self.builders[i] for i in indices_P]

    def __len__(self) -> int:
        return len(self.builders)

    @property
    @override
    def training_problems(self) -> Sequence[_Builder]:
        return self.builders


def check_prompt(name: str, length: int, context_length: int) -> None:
    """Refuse a prompt of so many tokens if nothing is left of the context for an answer.

    Raises:
        DataError: Names the problem.
    """
    if length >= context_length:
        raise DataError(
            f"{name}: its prompt of {plural(length, 'token')} leaves no room in the engine's "
            f"context of {plural(context_length, 'token')}; shorten the prompt or raise "
            "engine.max_model_len"
        )


class ProblemDataset(EpochDataset[ProblemGroupBuilder]):
    """Problems whose gold answers are graded in this process before training.

    Args:
        held_out: problems that are checked with them, and not trained on.
    """

    def __init__(
        self,
        builders: Sequence[ProblemGroupBuilder],
        problems_per_generation: int,
        seed: int,
        held_out: Sequence[ProblemGroupBuilder] = (),
    ) -> None:
        super().__init__(builders, problems_per_generation, seed)
        self.held_out = held_out

    async def validate(self, context_length: int) -> None:
        """Check every prompt's length and grade every gold answer, of held-out problems too."""
        say(f"checking {len(self.builders):,} training problems")
        for builder in (*self.builders, *self.held_out):
            await check_problem(builder, context_length)


async def check_problem(builder: ProblemGroupBuilder, context_length: int) -> None:
    """Check its prompt's length, and grade its gold answer.

    Raises:
        DataError: Names the problem.
    """
    try:
        env = builder.make_env()
        if isinstance(env, MessageEnv):
            env.policy = Script((), env.chat.tokenizer, context_length)
        prompt_T = (await env.initial_observation()).tokens_T
        check_prompt(builder.name, len(prompt_T), context_length)
        if builder.gold is not None and isinstance(env, ProblemEnv | MessageEnv):
            await _check_gold(builder, context_length)
    except EnvError as error:
        said = str(error).removeprefix(f"{builder.name}: ")  # A reward names its row itself.
        frames = own_frames("".join(traceback.format_exception(error)))
        raise DataError(f"{builder.name}: {said}\n{frames}".rstrip()) from error


async def _check_gold(builder: ProblemGroupBuilder, context_length: int) -> None:
    env, gold, hint = builder.make_env(), builder.gold, ""
    if isinstance(env, MessageEnv):
        texts = (gold,) if isinstance(gold, str) else gold or ()
        script = Script(texts, env.chat.tokenizer, context_length)
        earned, full_reward = (await run_rollout(env, script)).reward, env.full_reward
    else:
        assert isinstance(env, ProblemEnv)
        earned, full_reward = (await env.graded(str(gold))).reward, env.full_reward
        hint = env.gold_hint
    if not math.isclose(earned, full_reward):
        raise DataError(
            f"{builder.name}: its own solution earns {earned:g} of {full_reward:g}: {gold!r:.200}"
            f"{hint}"
        )
