"""Problems in memory, in batches that are a pure function of the generation.

A batch may also be dealt out to the mirrored pairs of genomes (`deal`), in place of one that the
whole population shares. A step is made of differences within pairs: (fitness of centre + σ·ε) −
(fitness of centre − σ·ε). Only the two of a pair have to attempt the same problems, so a
generation's problems can be dealt out to the pairs: more problems are seen for the same number of
rollouts, and the luck of a batch is not shared by all pairs (reported to help LoRA). Its cost:
rewards of different pairs do not compare, so fitness's unit, their spread, also has the problems'
difficulty in it. Problem j of row r is the r-th problem of pair j. A row is a group like any other,
so everything that works on problems x genomes works on rows x genomes.
"""

import contextlib
import dataclasses
import functools
import random
from collections.abc import Iterable, Sequence
from typing import Generic

import anyio
import chz
from typing_extensions import TypeVar, override

from es_cookbook.common.errors import ConfigError, DataError, leaves
from es_cookbook.common.names import Names
from es_cookbook.common.registry import Registered
from es_cookbook.common.seeds import derive_seed
from es_cookbook.common.terminal import say
from es_cookbook.rl.messages.answer_texts import AnswerTexts
from es_cookbook.rl.problem_env import ProblemGroupBuilder
from es_cookbook.rl.types import (
    Datasets,
    Env,
    EnvGroup,
    EnvGroupBuilder,
    GroupReward,
    LostRollout,
    Policy,
    RLDataset,
    RLDatasetBuilder,
    SamplingParams,
    Tokenizer,
    Trajectory,
    TrajectoryGroup,
)

DATASETS = Names(Registered("datasets"), default="rows")
"""Data sets by the names that users type."""
_TRIED = 32
"""Problems, spread over all, whose gold answers show which metrics the Envs report."""


def check_count(num_rows: int, problems_per_generation: int) -> None:
    """Refuse a batch of more problems than there are to train on, or of none.

    Raises:
        ConfigError: How many there are.
    """
    if not 1 <= problems_per_generation <= num_rows:
        raise ConfigError(
            f"dataset.problems_per_generation must be from 1 to {num_rows}, the number of "
            f"training problems, found {problems_per_generation}"
        )


def one_by_one(builder: RLDatasetBuilder) -> RLDatasetBuilder:
    """Return the builder with batches of one problem, which fit any number of problems."""
    if "problems_per_generation" in chz.chz_fields(builder):
        return chz.replace(builder, problems_per_generation=1)
    return builder


def tell_none_held_out(source: str, test_source: str | None, advice: str) -> None:
    """Say that no row of a source is held out, and what to do about it.

    Raises:
        DataError: `test_source` has no rows.
    """
    if test_source is not None:
        raise DataError(f"{test_source}: there are no rows to test on")
    say(
        f"{source}: none of its rows is in the share that is held out, so nothing measures what is "
        f"learned; {advice}, and dataset.num_test=0 says that none are wanted"
    )


def in_epochs(size: int, seed: int, start: int, count: int) -> list[int]:
    """Return `count` indices from `start` on of an endless sequence with all `size` once an epoch.

    Epochs follow each other without a gap, each in a different order, so a batch may end one and
    begin the next.
    """
    places = (divmod(place, size) for place in range(start, start + count))
    return [_epoch(size, seed, number)[place] for number, place in places]


@functools.lru_cache(maxsize=16)
def _epoch(size: int, seed: int, number: int) -> Sequence[int]:
    order = list(range(size))
    random.Random(derive_seed(seed, "epoch", number)).shuffle(order)
    return order


_Builder = TypeVar("_Builder", bound=EnvGroupBuilder, default=ProblemGroupBuilder)


class ProblemDataset(RLDataset, Generic[_Builder]):
    """Every problem once per epoch, in an order that follows from a seed (`in_epochs`).

    Args:
        held_out: problems that are checked with them, and not trained on.
    """

    def __init__(
        self,
        builders: Sequence[_Builder],
        problems_per_generation: int,
        seed: int,
        held_out: Sequence[_Builder] = (),
    ) -> None:
        check_count(len(builders), problems_per_generation)
        self.builders = builders
        self.problems_per_generation = problems_per_generation
        self.held_out = held_out
        self._seed = seed

    @override
    def get_batch(self, generation: int) -> Sequence[_Builder]:
        count = self.problems_per_generation
        indices_P = in_epochs(len(self.builders), self._seed, generation * count, count)
        return [self.builders[i] for i in indices_P]

    @override
    def __len__(self) -> int:
        return len(self.builders)

    @property
    @override
    def training_problems(self) -> Sequence[_Builder]:
        return self.builders

    @override
    async def validate(self, context_length: int) -> None:
        say(f"checking {len(self.builders):,} training problems")
        await check_all((*self.builders, *self.held_out), context_length)


async def check_all(problems_P: Sequence[EnvGroupBuilder], context_length: int) -> None:
    """Check problems, those that wait for something at the same time.

    Raises:
        DataError: As `EnvGroupBuilder.check`.
    """
    try:
        async with anyio.create_task_group() as checking:
            for problem in problems_P:
                checking.start_soon(problem.check, context_length)
    except BaseExceptionGroup as errors:
        raise next(leaves(errors)) from None


async def validate(
    datasets: Datasets, tokenizer: Tokenizer, context_length: int, sampling: SamplingParams
) -> None:
    """Check a dataset (`RLDataset.validate`), and all gold answers as the model says them.

    A data set that has no list of its problems checks those that it makes itself.

    Raises:
        DataError: As `RLDataset.validate`, and where the model cannot say a gold answer.
    """
    await datasets.train.validate(context_length)
    if problems_P := datasets.train.training_problems:
        await _check_said([*problems_P, *datasets.test_P], tokenizer, sampling)


async def check_attempted(
    problems_P: Sequence[EnvGroupBuilder],
    tokenizer: Tokenizer,
    context_length: int,
    sampling: SamplingParams,
) -> None:
    """Run all checks of problems that are attempted and not trained on.

    Raises:
        DataError: As `EnvGroupBuilder.check`, and where the model cannot say a gold answer.
    """
    await check_all(problems_P, context_length)
    await _check_said(problems_P, tokenizer, sampling)


async def _check_said(
    problems_P: Iterable[EnvGroupBuilder], tokenizer: Tokenizer, sampling: SamplingParams
) -> None:
    """Grade gold answers as the model says them.

    Raises:
        DataError: One earns less so; names the problem, and what is lost on the way.
    """
    texts = AnswerTexts(tokenizer)
    for problem in map(unchanged, problems_P):
        if isinstance(problem, ProblemGroupBuilder):
            await problem.check_said(texts, sampling.stop)


@dataclasses.dataclass(frozen=True, slots=True)
class ChangedProblem(EnvGroupBuilder):
    """A problem whose Envs a subclass changes (`make_envs`).

    Attributes:
        problem: the other one.
    """

    problem: EnvGroupBuilder

    @override
    async def compute_group_rewards(
        self, trajectories: Sequence[Trajectory | LostRollout], policies: Sequence[Policy]
    ) -> Sequence[GroupReward | LostRollout] | None:
        return await self.problem.compute_group_rewards(trajectories, policies)

    @property
    @override
    def asks_genomes(self) -> bool:
        return self.problem.asks_genomes

    @property
    @override
    def is_graded(self) -> bool:
        return self.problem.is_graded

    @property
    @override
    def tags(self) -> tuple[str, ...]:
        return self.problem.tags

    @property
    @override
    def digests(self) -> tuple[int, ...]:
        return self.problem.digests

    @property
    def gold(self) -> str | tuple[str, ...] | None:
        """The problem's gold answer, if it has one."""
        return getattr(self.problem, "gold", None)

    @property
    def usual_stop(self) -> tuple[str, ...]:
        """Texts that end an answer where `SamplingParams.stop` is None."""
        return getattr(self.problem, "usual_stop", ())

    @override
    async def check(self, context_length: int) -> None:
        await self.problem.check(context_length)


def unchanged(problem: EnvGroupBuilder) -> EnvGroupBuilder:
    """Return the problem inside any `ChangedProblem`s."""
    while isinstance(problem, ChangedProblem):
        problem = problem.problem
    return problem


def compares(problem: EnvGroupBuilder) -> bool:
    """Return whether a problem has group rewards, which need other genomes' attempts."""
    method = type(unchanged(problem)).compute_group_rewards
    return method is not EnvGroupBuilder.compute_group_rewards


def with_gold(
    asked: EnvGroupBuilder, use: str
) -> tuple[ProblemGroupBuilder, str | tuple[str, ...]]:
    """Return the problem, inside any `ChangedProblem`s, and its gold answer.

    Args:
        asked: any problem.
        use: use of the gold answer; follows "which" in the sentence.

    Raises:
        DataError: It has none; names the problem.
    """
    problem = unchanged(asked)
    if isinstance(problem, ProblemGroupBuilder) and problem.gold is not None:
        return problem, problem.gold
    name = getattr(problem, "name", type(problem).__name__)
    raise DataError(f"{name}: it has no gold answer, which {use}")


async def told_golds(
    problems_P: Sequence[EnvGroupBuilder], tokenizer: Tokenizer, attempts: int = 1
) -> Sequence[TrajectoryGroup]:
    """Return groups of one genome that gives gold answers, to some of the problems.

    Empty if one of them has no gold answer, or has group rewards.

    Raises:
        EnvError: An Env broke its contract.
    """
    from es_cookbook.rl.messages.message_env import told_gold  # Few runs try their metrics.

    groups_P: list[TrajectoryGroup] = []
    for asked in problems_P[:: max(1, len(problems_P) // _TRIED)]:
        problem = unchanged(asked)
        if not isinstance(problem, ProblemGroupBuilder) or compares(problem) or not problem.gold:
            return ()
        told = await told_gold(problem.make_env(), problem.gold, tokenizer)
        groups_P.append(TrajectoryGroup([[told] * attempts], tags=asked.tags))
    return groups_P


@dataclasses.dataclass(frozen=True, slots=True)
class _Row(EnvGroupBuilder):
    """One problem for each pair of genomes."""

    problems: Sequence[EnvGroupBuilder]

    @property
    @override
    def asks_genomes(self) -> bool:
        return any(problem.asks_genomes for problem in self.problems)

    @override
    async def make_envs(self, num_envs: int) -> EnvGroup:
        size = num_envs // len(self.problems)
        async with contextlib.AsyncExitStack() as stack:
            envs: list[Env] = []
            for problem in self.problems:
                group = await problem.make_envs(size)
                stack.push_async_callback(group.close)
                envs += group.envs
            return _Groups(envs, stack.pop_all())

    @override
    async def compute_group_rewards(
        self, trajectories: Sequence[Trajectory | LostRollout], policies: Sequence[Policy]
    ) -> Sequence[GroupReward | LostRollout] | None:
        size = len(trajectories) // len(self.problems)
        rewards: list[GroupReward | LostRollout] = []
        is_none = True
        for j, problem in enumerate(self.problems):
            part = slice(j * size, (j + 1) * size)
            found = await problem.compute_group_rewards(trajectories[part], policies[part])
            is_none = is_none and found is None
            rewards += [GroupReward(0.0)] * size if found is None else found
        return None if is_none else rewards


class _Groups(EnvGroup):
    """The Envs of several groups, closed with them."""

    def __init__(self, envs: Sequence[Env], stack: contextlib.AsyncExitStack) -> None:
        super().__init__(envs)
        self._stack = stack

    @override
    async def close(self) -> None:
        await self._stack.aclose()


def deal(problems_P: Sequence[EnvGroupBuilder], num_pairs: int) -> list[EnvGroupBuilder]:
    """Return the rows of a batch that is dealt out to the pairs.

    Raises:
        ConfigError: It does not divide evenly.
    """
    if len(problems_P) % num_pairs:
        raise ConfigError(
            f"batch_per_pair deals a generation's {len(problems_P)} problems out to {num_pairs} "
            f"pairs, so their number must be a multiple of {num_pairs} (half of "
            "optimizer.population_size)"
        )
    return [_Row(problems_P[i : i + num_pairs]) for i in range(0, len(problems_P), num_pairs)]


def gather(
    groups_R: Sequence[TrajectoryGroup], problems_P: Sequence[EnvGroupBuilder]
) -> list[TrajectoryGroup]:
    """Split the groups of rows into a group of two genomes for each problem."""
    num_pairs = len(problems_P) // len(groups_R)
    return [
        TrajectoryGroup(
            row.trajectories_G_K[2 * j : 2 * j + 2],
            row.group_rewards_G_K and row.group_rewards_G_K[2 * j : 2 * j + 2],
            problems_P[r * num_pairs + j].tags,
        )
        for r, row in enumerate(groups_R)
        for j in range(num_pairs)
    ]
