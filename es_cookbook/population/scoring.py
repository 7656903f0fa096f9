"""From a generation's rollouts to one fitness per genome, and the metrics to report.

The objective makes a score of each genome's attempts at each problem; regularisers add problems of
their own behind the batch's; fitness puts both together.
"""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from es_cookbook.engines.base import Engine
from es_cookbook.evolution.fitness import Fitness, ZScore, reliability
from es_cookbook.rl.data.problem_dataset import deal, gather
from es_cookbook.rl.objectives import SOLVED, Mean, Objective, outcomes
from es_cookbook.rl.regularisers import AddedProblems, Regulariser
from es_cookbook.rl.rollouts import (
    answer_lengths,
    env_metrics,
    mean_of,
    mean_rewards,
    reward_and_solved,
)
from es_cookbook.rl.types import EnvGroupBuilder, ProblemResult, TrajectoryGroup


@dataclasses.dataclass(frozen=True, slots=True)
class Asked:
    """The problems of one generation.

    Attributes:
        generation: its number.
        batch_P: the data set's problems.
        parts_R: problems that are attempted: the batch's, then each regulariser's. The batch's are
            a row each where it is dealt out to pairs, and answers to score with a surrogate.
        answered_P: the centre's attempts at the batch, with a surrogate.
    """

    generation: int
    batch_P: Sequence[EnvGroupBuilder]
    parts_R: Sequence[Sequence[EnvGroupBuilder]]
    answered_P: Sequence[TrajectoryGroup] = ()

    @property
    def problems_P(self) -> Sequence[EnvGroupBuilder]:
        """All of them."""
        return list(itertools.chain(*self.parts_R))


@dataclasses.dataclass(frozen=True, slots=True)
class Scored:
    """Scores and metrics of a generation's rollouts.

    Attributes:
        scores_P_G: scores on the batch's problems, NaN if a genome has none. If the batch is dealt
            out to pairs, a problem is a row of it.
        fitness_G: one number per genome.
        batch_groups_P: rollouts of each of the batch's problems, by the genomes that attempted it,
            or the centre.
        groups_P: all rollouts, the regularisers' too; no genome's that only scored answers.
        metrics: `reward/...` over the mean rewards of the batch's problems. If the objective is
            another, or the surrogate, `objective/mean` and `objective/std_genomes` over its scores,
            and what the objective reports itself;
            `genomes/reliability`, how much of the genomes' differences is not luck; `env/...` of
            all problems; `rollouts/...` of the lengths of answers to the batch
            (`rl.rollouts.answer_lengths`).
    """

    scores_P_G: NDArray[np.float64]
    fitness_G: NDArray[np.float64]
    batch_groups_P: Sequence[TrajectoryGroup]
    groups_P: Sequence[TrajectoryGroup]
    metrics: Mapping[str, float]


@dataclasses.dataclass(frozen=True, slots=True)
class Scoring:
    """Turns the rollouts of a run into scores and fitness.

    Attributes:
        objective: maps attempts to scores.
        fitness: maps scores to fitness.
        regularisers: weight and problems of each, as `loaded` returns them.
        num_pairs: pairs of genomes that the batch is dealt out to; 0: all attempt all of it.
        solved_T: mean share solved in each recorded generation that has results, in order.
    """

    objective: Objective = dataclasses.field(default_factory=Mean)
    fitness: Fitness = dataclasses.field(default_factory=ZScore)
    regularisers: Sequence[tuple[float, AddedProblems]] = ()
    num_pairs: int = 0
    solved_T: list[float] = dataclasses.field(default_factory=list[float])

    def results(
        self, asked: Asked, batch_groups_P: Sequence[TrajectoryGroup]
    ) -> Sequence[ProblemResult]:
        """Return results for the history, if the objective follows them; else nothing."""
        if not self.objective.follows_results:
            return ()
        keys_P = [next(iter(each.digests), p) for p, each in enumerate(asked.batch_P)]
        return [
            ProblemResult(f"{key:x}", *reward_and_solved(group, SOLVED))
            for key, group in zip(keys_P, batch_groups_P, strict=True)
        ]

    def tell(self, results_P: Sequence[ProblemResult]) -> None:
        """Add the results that the history keeps of a generation, new or recorded."""
        if not math.isnan(share := mean_of([result.solved for result in results_P])):
            self.solved_T.append(share)

    def problems(
        self,
        generation: int,
        batch_P: Sequence[EnvGroupBuilder],
        answers_P: Sequence[EnvGroupBuilder] = (),
        answered_P: Sequence[TrajectoryGroup] = (),
    ) -> Asked:
        """Return the problems that the genomes attempt: the batch's, then each regulariser's.

        With a surrogate, `answers_P` in place of the batch's problems, which the centre attempted.
        """
        rows = deal(batch_P, self.num_pairs) if self.num_pairs else answers_P or batch_P
        parts_R = [rows, *(problems(generation, batch_P) for _, problems in self.regularisers)]
        return Asked(generation, batch_P, parts_R, answered_P)

    def score(self, asked: Asked, groups_P: Sequence[TrajectoryGroup]) -> Scored:
        """Score the rollouts of these problems.

        Raises:
            ConfigError: The objective counts a metric that no Env reports.
        """
        rest = iter(groups_P)
        batch_P, *added_R = (list(itertools.islice(rest, len(part))) for part in asked.parts_R)
        is_plain = isinstance(self.objective, Mean)
        found = None if is_plain else outcomes(batch_P, asked.generation, self.solved_T)
        scores_P_G = mean_rewards(batch_P) if found is None else self.objective(found)
        attempted_P = asked.answered_P or batch_P
        metrics = dict(reward_metrics(mean_rewards(attempted_P)))
        if asked.answered_P:  # No genome has separate rewards.
            metrics = {"reward/mean": metrics["reward/mean"]}
        if not is_plain or asked.answered_P:
            measured = reward_metrics(scores_P_G)
            for key in ("mean", "std_genomes"):
                metrics[f"objective/{key}"] = measured[f"reward/{key}"]
        if found is not None:
            metrics |= self.objective.metrics(found)
        if not self.num_pairs:  # Else genomes also differ by their problems.
            metrics["genomes/reliability"] = reliability(scores_P_G)
        batch_groups_P = gather(batch_P, asked.batch_P) if self.num_pairs else attempted_P
        added_P = list(itertools.chain(*added_R))
        metrics |= env_metrics([*batch_groups_P, *added_P])
        metrics |= answer_lengths(batch_groups_P, asked.batch_P)
        weights = [weight for weight, _ in self.regularisers]
        added = zip(weights, map(mean_rewards, added_R), strict=True)
        fitness_G = self.fitness(scores_P_G, list(added))
        return Scored(scores_P_G, fitness_G, batch_groups_P, [*attempted_P, *added_P], metrics)


def loaded(
    regularisers: Sequence[Regulariser], engine: Engine, run_seed: int
) -> list[tuple[float, AddedProblems]]:
    """Load the weight and problems of each regulariser, in an order by the run's seed.

    Raises:
        DataError: A row that cannot be used.
    """
    tokenizer, context_length = engine.tokenizer, engine.traits.context_length
    return [(each.weight, each(tokenizer, context_length, run_seed)) for each in regularisers]


def reward_metrics(rewards_P_G: NDArray[np.float64]) -> Mapping[str, float]:
    """Return `reward/...` over problems and genomes, without lost rollouts; NaN if all were lost.

    >>> reward_metrics(np.array([[0.0, 1.0], [0.5, np.nan]]))["reward/max_genome"]
    1.0
    """
    present_P_G = ~np.isnan(rewards_P_G)
    rewards_G = np.array(
        [
            rewards_P[present_P].mean()
            for rewards_P, present_P in zip(rewards_P_G.T, present_P_G.T, strict=True)
            if present_P.any()
        ]
    )
    if not len(rewards_G):
        rewards_G = np.array([math.nan])
    rewards = rewards_P_G[present_P_G]
    return {
        "reward/mean": float(rewards.mean()) if len(rewards) else math.nan,
        "reward/max_genome": float(rewards_G.max()),
        "reward/min_genome": float(rewards_G.min()),
        "reward/std_genomes": float(rewards_G.std()),
    }
