"""A batch for each mirrored pair of genomes, in place of one that the whole population shares.

A step is made of differences within pairs: (fitness of centre + σ·ε) − (fitness of centre − σ·ε).
Only the two of a pair have to attempt the same problems, so a generation's problems can be dealt
out to the pairs: more problems are seen for the same number of rollouts, and the luck of a batch
is not shared by all pairs (reported to help LoRA). What it costs: rewards of different pairs do not
compare, so fitness's unit, their spread, also has the problems' difficulty in it.

Problem j of row r is the r-th problem of pair j. A row is a group like any other, so everything
that works on problems x genomes works on rows x genomes.
"""

import contextlib
import dataclasses
from collections.abc import Sequence

from typing_extensions import override

from es_cookbook.common.errors import ConfigError
from es_cookbook.rl.types import (
    Env,
    EnvGroup,
    EnvGroupBuilder,
    GroupReward,
    LostRollout,
    Policy,
    Trajectory,
    TrajectoryGroup,
)


@dataclasses.dataclass(frozen=True, slots=True)
class Row(EnvGroupBuilder):
    """One problem for each pair of genomes."""

    problems: Sequence[EnvGroupBuilder]

    @property
    @override
    def asks_genomes(self) -> bool:
        return any(problem.asks_genomes for problem in self.problems)

    async def make_envs(self, num_envs: int) -> EnvGroup:
        """Envs of each pair's own problem, pair after pair."""
        size = num_envs // len(self.problems)
        async with contextlib.AsyncExitStack() as opened:
            groups: list[EnvGroup] = []
            for problem in self.problems:
                groups.append(await problem.make_envs(size))
                opened.push_async_callback(groups[-1].close)
            envs = [env for group in groups for env in group.envs]
            return _Groups(envs, opened.pop_all())

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

    def __init__(self, envs: Sequence[Env], opened: contextlib.AsyncExitStack) -> None:
        super().__init__(envs)
        self._opened = opened

    @override
    async def close(self) -> None:
        await self._opened.aclose()


def deal(problems_P: Sequence[EnvGroupBuilder], num_pairs: int) -> list[EnvGroupBuilder]:
    """Rows of a batch that is dealt out to the pairs.

    Raises:
        ConfigError: It does not divide evenly.
    """
    if len(problems_P) % num_pairs:
        raise ConfigError(
            f"batch_per_pair deals a generation's {len(problems_P)} problems out to {num_pairs} "
            f"pairs, so their number must be a multiple of {num_pairs} (half of "
            "optimizer.population_size)"
        )
    return [Row(problems_P[i : i + num_pairs]) for i in range(0, len(problems_P), num_pairs)]


def gather(
    groups_R: Sequence[TrajectoryGroup], problems_P: Sequence[EnvGroupBuilder]
) -> list[TrajectoryGroup]:
    """What rows brought, as a group of two genomes for each of the problems that were dealt out."""
    num_pairs = len(problems_P) // len(groups_R)
    return [
        TrajectoryGroup(
            row.trajectories_G_K[2 * j : 2 * j + 2],
            row.group_rewards_G_K and row.group_rewards_G_K[2 * j : 2 * j + 2],
            row.group_metrics_G_K and row.group_metrics_G_K[2 * j : 2 * j + 2],
            row.group_logs_G_K and row.group_logs_G_K[2 * j : 2 * j + 2],
            problems_P[r * num_pairs + j].tags,
        )
        for r, row in enumerate(groups_R)
        for j in range(num_pairs)
    ]
