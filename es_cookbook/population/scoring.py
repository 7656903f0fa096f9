"""From what a generation's rollouts gave to one fitness a genome, and what to report about it.

The objective makes a score of each genome's attempts at each problem; regularisers add problems of
their own behind the batch's; fitness puts both together.
"""

import dataclasses
import itertools
from collections import deque
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from es_cookbook.engines.base import Engine
from es_cookbook.evolution.fitness import Added, Fitness, reliability
from es_cookbook.rl.data.pairs import deal, gather
from es_cookbook.rl.objectives import Mean, Objective, outcomes
from es_cookbook.rl.regularisers.base import Regulariser
from es_cookbook.rl.rollouts import answer_lengths, env_metrics, mean_rewards
from es_cookbook.rl.surrogate import AnswersProblem, Surrogate
from es_cookbook.rl.types import EnvGroupBuilder, TrajectoryGroup
from es_cookbook.runs.measures import reward_metrics


@dataclasses.dataclass(frozen=True, slots=True)
class _Asked:
    """What a generation's genomes were asked, and so what their answers are scored by.

    Attributes:
        batch_P: the data set's problems.
        answered_P: the centre's attempts at them, with a surrogate.
        answers_P: what the genomes are asked in their place then.
        sizes: of the batch and of each regulariser's problems.
    """

    generation: int
    batch_P: Sequence[EnvGroupBuilder]
    answered_P: Sequence[TrajectoryGroup]
    answers_P: Sequence[AnswersProblem]
    sizes: Sequence[int]


class Scoring:
    """How a run's genomes are judged.

    Args:
        objective: from attempts to scores.
        fitness: from scores to fitness.
        regularisers: what else is wanted of genomes; None for nothing.
        engine: whose tokenizer and context they are loaded for.
        run_seed: of the order in which they go through their rows.
        num_pairs: of genomes, to which the batch is dealt out; 0: all attempt all of it.
        surrogate: what genomes are asked where the centre attempts the batch; None: they do.

    Attributes:
        batch_groups_P: what came of each of the batch's problems that were scored last, by the
            genomes that attempted it, or the centre.
        groups_P: all rollouts that were scored last, the regularisers' too; no genome's that only
            scored answers.

    Raises:
        DataError: A regulariser's row that cannot be used.
    """

    def __init__(
        self,
        objective: Objective,
        fitness: Fitness,
        regularisers: Sequence[Regulariser | None],
        engine: Engine,
        run_seed: int,
        num_pairs: int = 0,
        surrogate: Surrogate | None = None,
    ) -> None:
        self._objective = objective
        self._fitness = fitness
        chosen = [regulariser for regulariser in regularisers if regulariser is not None]
        self._weights = [regulariser.weight for regulariser in chosen]
        self._problems_of = [
            regulariser(engine.tokenizer, engine.traits.context_length, run_seed)
            for regulariser in chosen
        ]
        self.batch_groups_P: Sequence[TrajectoryGroup] = ()
        self.groups_P: Sequence[TrajectoryGroup] = ()
        self._num_pairs = num_pairs
        self._surrogate = surrogate
        self._asked = deque[_Asked]()
        self._metrics: Mapping[str, float] = {}

    def problems(
        self,
        generation: int,
        batch_P: Sequence[EnvGroupBuilder],
        answered_P: Sequence[TrajectoryGroup] = (),
    ) -> Sequence[EnvGroupBuilder]:
        """All that the genomes attempt: the batch's problems, then each regulariser's.

        With a surrogate, in place of the batch's problems the centre's answers to them. Generations
        are scored in the order in which this was asked.
        """
        rows = deal(batch_P, self._num_pairs) if self._num_pairs else batch_P
        answers_P: Sequence[AnswersProblem] = ()
        if self._surrogate is not None:
            rows = answers_P = [self._surrogate.problem(group) for group in answered_P]
        parts = [rows, *(problems(generation, batch_P) for problems in self._problems_of)]
        sizes = [len(part) for part in parts]
        self._asked.append(_Asked(generation, batch_P, answered_P, answers_P, sizes))
        return list(itertools.chain(*parts))

    def score(
        self, groups_P: Sequence[TrajectoryGroup]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Score what came of the oldest `problems` that have not been scored.

        Returns:
            `scores_P_G` of the batch's problems, NaN where a genome has none, and `fitness_G`. A
            problem is a row of them where the batch is dealt out to pairs.

        Raises:
            ConfigError: The objective counts a metric that no Env reports.
            EnvError: An infinite reward.
        """
        asked, rest = self._asked.popleft(), iter(groups_P)
        batch_P, *added_R = (list(itertools.islice(rest, size)) for size in asked.sizes)
        attempted_P = batch_P if self._surrogate is None else asked.answered_P
        metrics = dict(reward_metrics(mean_rewards(attempted_P)))
        if self._surrogate is not None:  # No genome has rewards of its own.
            metrics = {"reward/mean": metrics["reward/mean"]}
        scores_P_G = mean_rewards(batch_P)
        if not isinstance(self._objective, Mean):
            scores_P_G = self._objective(outcomes(batch_P, asked.generation))
        if not isinstance(self._objective, Mean) or self._surrogate is not None:
            measured = reward_metrics(scores_P_G)
            for key in ("mean", "std_genomes"):
                metrics[f"objective/{key}"] = measured[f"reward/{key}"]
        if self._surrogate is not None:
            metrics["surrogate/answers"] = sum(len(each.answers) for each in asked.answers_P)
            metrics["surrogate/tokens"] = sum(each.num_tokens for each in asked.answers_P)
        if not self._num_pairs:  # Else genomes also differ by their problems.
            metrics["genomes/reliability"] = reliability(scores_P_G)
        self.batch_groups_P = gather(batch_P, asked.batch_P) if self._num_pairs else attempted_P
        self.groups_P = [*attempted_P, *itertools.chain(*added_R)]
        shown_P = [*self.batch_groups_P, *itertools.chain(*added_R)]
        self._metrics = metrics | env_metrics(shown_P) | answer_lengths(self.batch_groups_P)
        added = [
            Added(weight, mean_rewards(groups))
            for weight, groups in zip(self._weights, added_R, strict=True)
        ]
        return scores_P_G, self._fitness(scores_P_G, added)

    def metrics(self) -> Mapping[str, float]:
        """What was scored last: `reward/...` over the mean rewards of the batch's problems.

        Where the objective is another, or the surrogate, `objective/mean` and
        `objective/std_genomes` over its scores; `genomes/reliability`, how much of the genomes'
        differences is not luck; `env/...` of all problems; `rollouts/...` of the lengths of answers
        to the batch (`rl.rollouts.answer_lengths`). With a surrogate, how many of the
        centre's answers a genome scores, `surrogate/answers`, and their `surrogate/tokens`.
        """
        return self._metrics
