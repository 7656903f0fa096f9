"""Genomes score the centre's answers, as a policy gradient would have them scored."""

import dataclasses
import math
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from es_cookbook import FullRank, Observation, PopulationSampler, SamplingParams, TorchEngineBuilder
from es_cookbook.common.errors import DataError
from es_cookbook.engines.base import Engine, LogprobsRequest
from es_cookbook.evolution.genome import Genome, Term
from es_cookbook.evolution.noise import noise
from es_cookbook.plugins.gradients.learner import Learner
from es_cookbook.rl.problem_env import ProblemGroupBuilder
from es_cookbook.rl.rollouts import Example, mean_rewards
from es_cookbook.rl.surrogate import AnswersProblem, BestAnswers, GoldAnswers, Surrogate
from es_cookbook.rl.types import Action, LostRollout, Trajectory, TrajectoryGroup, Transition
from tests.fakes import FakeEngine, problem
from tests.rl.messages.test_message_env import TOKENIZER
from tests.tiny_run import write_tiny_model

LOST = LostRollout("timed out", "")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
async def engine(model: Path) -> AsyncGenerator[Engine]:
    built = await TorchEngineBuilder(num_lanes=1)(model_name=str(model), search_space=FullRank())
    yield built
    await built.close()


def turn(observation: Sequence[int], said: Sequence[int], reward: float) -> Transition:
    action = Action(tuple(said), "", "stop", (-1.0,) * len(said))
    return Transition(Observation(tuple(observation)), action, reward, {}, {})


def answered(*rollouts_K: Trajectory | LostRollout) -> TrajectoryGroup:
    return TrajectoryGroup([rollouts_K], tags=("even",))


RIGHT, WRONG = (
    Trajectory((turn((5, 6), said, reward),)) for said, reward in (((7, 8), 1), ((9,), 0))
)
CHAT = Trajectory((turn((5, 6), (7,), 0.0), turn((5, 6, 7, 11, 12), (8, 9), 3.0)))


async def asked_of(group: TrajectoryGroup, **options: bool) -> AnswersProblem:
    """What genomes score in place of a problem of which the centre made this."""
    engine = FakeEngine()
    return await Surrogate(**options).problem(problem(0, "train"), group, engine.tokenizer)


async def test_answers_have_their_reward_above_the_others_as_weight_and_equal_ones_are_one() -> (
    None
):
    problem = await asked_of(answered(RIGHT, WRONG, LOST, RIGHT), normalise=False)
    right = Example((5, 6, 7, 8), (False, False, True, True), 1 / 9, count=2)
    wrong = Example((5, 6, 9), (False, False, True), -2 / 9)
    assert [each.tokens_T for each in problem.answers] == [right.tokens_T, wrong.tokens_T]
    assert [each.count for each in problem.answers] == [2, 1]
    weights = [each.weight for each in problem.answers]
    assert weights == pytest.approx([right.weight, wrong.weight]), "of the three that ended"
    assert problem.num_tokens == 7 and problem.tags == ("even",)
    assert sum(each.weight * each.count for each in problem.answers) == pytest.approx(0)


async def test_the_best_answer_alone_counts_by_its_reward_above_the_mean() -> None:
    tokenizer = FakeEngine().tokenizer
    group = answered(WRONG, CHAT, RIGHT, CHAT)
    found = await BestAnswers().problem(problem(0, "train"), group, tokenizer)
    (best,) = found.answers
    assert best.tokens_T == (5, 6, 7, 11, 12, 8, 9) and best.count == 1
    assert best.weight == pytest.approx((3 - 7 / 4) / 4)
    cool, given = (BestAnswers().sampling(SamplingParams(temperature=t)) for t in (0.0, 0.8))
    assert (cool.temperature, given.temperature) == (0.5, 0.8)
    for same in (answered(RIGHT, RIGHT), answered(LOST)):
        assert not (await BestAnswers().problem(problem(0, "train"), same, tokenizer)).answers


async def scores(
    engine: Engine, problems: Sequence[AnswersProblem], genomes: Sequence[Genome]
) -> np.ndarray:
    sampler = PopulationSampler(engine, sampling=SamplingParams(max_tokens=3))
    groups_P = await sampler.rollout(0, problems, genomes)
    return mean_rewards(groups_P).sum(axis=0)


def learn_nothing(
    logprobs: torch.Tensor, sampled: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    del sampled
    return weights * logprobs


def gradient(model: Path, examples: Sequence[Example]) -> Mapping[str, torch.Tensor]:
    """Of the same objective, by backpropagation."""
    loaded = AutoModelForCausalLM.from_pretrained(model).requires_grad_(False).eval()
    names = [name for name, weight in loaded.named_parameters()]
    learner = Learner(loaded, names, tokens_per_pass=4096, max_gradient_norm=math.inf)
    learner.step(examples, learn_nothing, 0.0, 1.0)
    return {
        name: -weight.grad for name, weight in learner.weights.items() if weight.grad is not None
    }


async def test_differences_of_scores_are_the_policy_gradient_along_a_perturbation(
    engine: Engine, model: Path
) -> None:
    groups = [answered(RIGHT, WRONG, RIGHT), answered(CHAT, WRONG)]
    problems = [await asked_of(group) for group in groups]
    of_all = gradient(model, [each for problem in problems for each in problem.answers])
    sigma = 1e-3
    for seed in (3, 4):
        mirrored = [Genome((Term(seed, sign * sigma),)) for sign in (1, -1)]
        above, below = await scores(engine, problems, mirrored)
        along = sum(
            float((grad * torch.from_numpy(noise(seed, name, tuple(grad.shape), "gaussian"))).sum())
            for name, grad in of_all.items()
        )
        assert (above - below) / (2 * sigma) == pytest.approx(along, rel=0.02)


async def test_gold_answers_are_scored_whole_with_the_end_of_sequence() -> None:
    engine, tokenizer = FakeEngine(), TOKENIZER
    asked, group = problem(4, "train"), TrajectoryGroup([], tags=("even",))
    scored = await GoldAnswers().problem(asked, group, tokenizer)
    prompt_T = (5, 5)
    gold_T = (*tokenizer.encode("ace", add_special_tokens=False), tokenizer.eos_token_id)
    (answer,) = scored.answers
    assert answer.tokens_T == prompt_T + gold_T and scored.tags == ("even",)
    assert answer.learned_T == (False,) * 2 + (True,) * len(gold_T)
    genome = Genome((Term(3, 0.1),))
    rewards_G = await scores(engine, [scored], [genome])
    await engine.load([genome])
    (expected,) = [await engine.logprobs(LogprobsRequest(0, prompt_T, gold_T))]
    assert rewards_G.tolist() == [pytest.approx(math.fsum(expected))]


async def test_a_problem_without_a_gold_answer_is_refused_by_name() -> None:
    nameless = dataclasses.replace(cast(ProblemGroupBuilder, problem(4, "train")), gold=None)
    tokenizer = FakeEngine().tokenizer
    for asked, name in ((nameless, "train 4"), (AnswersProblem(()), "AnswersProblem")):
        with pytest.raises(DataError, match=f"^{name}: it has no gold answer"):
            await GoldAnswers().problem(asked, TrajectoryGroup([]), tokenizer)
        with pytest.raises(DataError, match=f"^{name}: it has no gold answer"):
            GoldAnswers().check([problem(2, "train"), asked])
