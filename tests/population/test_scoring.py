"""Rollouts become fitness and metrics: the batch's by the objective, others by their weight."""

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from es_cookbook.evolution.fitness import Raw
from es_cookbook.plugins.regularisers.kl import KLToBase
from es_cookbook.plugins.regularisers.preference import PreferencePairs
from es_cookbook.population.scoring import Scoring, loaded
from es_cookbook.rl.objectives import Mean, Objective, PassAtK
from es_cookbook.rl.surrogate import AnswersProblem, Surrogate
from es_cookbook.rl.types import Action, Observation, Trajectory, TrajectoryGroup, Transition
from tests.fakes import FakeEngine, Following, problem, trajectory

BATCH_P = [problem(number, "train") for number in range(3)]


@pytest.fixture
def pairs(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("data") / "pairs.jsonl"
    path.write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n')
    return str(path)


def scoring(pairs: str, objective: Objective, kl: float, preference: float) -> Scoring:
    regularisers = (
        KLToBase(weight=kl, problems_per_generation=2),
        PreferencePairs(weight=preference, source=pairs, problems_per_generation=1),
    )
    return Scoring(objective, Raw(), loaded(regularisers, FakeEngine(), 0))


def group(reward_of: Callable[[int, int], float], metric: str) -> TrajectoryGroup:
    """Two genomes, two attempts."""
    rewards_G_K = [[reward_of(g, k) for k in range(2)] for g in range(2)]
    return TrajectoryGroup(
        [[trajectory(r, {metric: float(r == 1)}) for r in rewards_K] for rewards_K in rewards_G_K]
    )


def groups() -> Sequence[TrajectoryGroup]:
    """Genome 0 solves the batch's problems at every second attempt, genome 1 is never far off."""
    batch_P = [group(lambda g, k: float(k) if g == 0 else 0.75, "correct") for _ in range(3)]
    kl_P = [group(lambda g, k: -1.0 - g, "kl"), group(lambda g, k: -3.0 - g, "kl")]
    return [*batch_P, *kl_P, group(lambda g, k: 4.0 * g, "preferred")]


def test_a_regularisers_problems_come_after_the_batchs(pairs: str) -> None:
    problems = scoring(pairs, Mean(), 1.0, 1.0).problems(5, BATCH_P).problems_P
    assert list(problems[:3]) == BATCH_P
    assert [problem.tags for problem in problems[3:]] == [("kl",), ("kl",), ("preference",)]


def test_scores_are_the_objectives_of_the_batch_plus_weighted_means_of_the_others(
    pairs: str,
) -> None:
    judge = scoring(pairs, Mean(), 0.1, 0.5)
    scored = judge.score(judge.problems(0, BATCH_P), groups())
    fitness_G, metrics = scored.fitness_G, scored.metrics
    assert scored.scores_P_G.tolist() == [[0.5, 0.75]] * 3, "of the batch's problems alone"
    # Batch 0.5 and 0.75, KL 2 and 3, preference 0 and 4.
    total_G = np.array([0.5, 0.75]) - 0.1 * np.array([2, 3]) + 0.5 * np.array([0, 4])
    assert fitness_G == pytest.approx(total_G - total_G.mean())
    assert metrics["reward/mean"] == 0.625, "over the batch's problems alone"
    assert metrics["env/all/correct"] == 0.25
    assert "env/all/kl" in metrics and "env/all/preferred" in metrics
    assert not any(key.startswith("objective/") for key in metrics)


def test_another_objective_ranks_otherwise_and_is_measured_beside_the_rewards(pairs: str) -> None:
    judge = scoring(pairs, PassAtK(k=2), 0.0, 0.0)
    scored = judge.score(judge.problems(0, BATCH_P), groups())
    fitness_G, metrics = scored.fitness_G, scored.metrics
    assert scored.scores_P_G.tolist() == [[1.0, 0.0]] * 3
    assert fitness_G.tolist() == [0.5, -0.5], "by mean reward it is the other way round"
    assert (metrics["objective/mean"], metrics["objective/std_genomes"]) == (0.5, 0.5)
    assert metrics["reward/mean"] == 0.625


def test_an_objective_that_follows_results_is_told_those_of_recorded_generations() -> None:
    judge = Scoring(Following(), Raw(), [])
    asked = judge.problems(0, BATCH_P)
    batch_P = [group(lambda g, k: float(k), "correct") for _ in range(3)]
    results_P = judge.results(asked, batch_P)
    assert [result.solved for result in results_P] == [0.5] * 3
    judge.tell(results_P)
    judge.tell([dataclasses.replace(results_P[0], solved=math.nan)])
    assert judge.solved_T == [0.5]
    assert judge.score(asked, batch_P).metrics["objective/done"] == 0.5
    plain = Scoring(Mean(), Raw(), [])
    assert plain.results(asked, batch_P) == ()
    metrics = plain.score(asked, batch_P).metrics
    assert "reward/std_genomes" in metrics and "genomes/reliability" in metrics


async def test_with_a_surrogate_answers_are_scored_and_rewards_are_those_of_the_centre() -> None:
    kl = KLToBase(weight=0.5, problems_per_generation=1)
    regularisers = loaded((kl,), FakeEngine(), 0)
    judge = Scoring(Mean(), Raw(), regularisers)

    def said(token: int, reward: float) -> Trajectory:
        action = Action((token,), "", "stop", (-0.5,))
        metrics = {"correct": reward}
        return Trajectory((Transition(Observation((9,)), action, reward, metrics, {}),))

    answered_P = [
        TrajectoryGroup([[said(1, 1.0), said(2, 0.0)]]),
        TrajectoryGroup([[said(3, 0.0), said(3, 0.0)]]),
    ]
    tokenizer, surrogate = FakeEngine().tokenizer, Surrogate(attempts=2)
    answers_P = [
        await surrogate.problem(asked, answered, tokenizer)
        for asked, answered in zip(BATCH_P, answered_P, strict=False)
    ]
    asked = judge.problems(0, BATCH_P[:2], answers_P, answered_P)
    answers, nothing, of_kl = asked.problems_P
    assert isinstance(answers, AnswersProblem) and isinstance(nothing, AnswersProblem)
    assert [each.tokens_T for each in answers.answers] == [(9, 1), (9, 2)] and not nothing.answers
    assert of_kl.tags == ("kl",)
    groups_P = [
        group(lambda g, k: 1.0 + g, "unseen"),
        group(lambda g, k: 0.0, "unseen"),
        group(lambda g, k: -1.0 - g, "kl"),
    ]
    scored = judge.score(asked, groups_P)
    assert scored.scores_P_G.tolist() == [[1.0, 2.0], [0.0, 0.0]]
    # Scores 0.5 and 1, KL 1 and 2 with a weight of a half.
    assert scored.fitness_G == pytest.approx([0.0, 0.0])
    metrics = scored.metrics
    assert metrics["reward/mean"] == 0.25 and metrics["objective/mean"] == 0.75
    assert metrics["env/all/correct"] == 0.25 and "env/all/unseen" not in metrics
    assert scored.batch_groups_P == answered_P
    assert list(scored.groups_P) == [*answered_P, groups_P[2]]
    assert "reward/std_genomes" not in metrics, "no genome has rewards of its own"
