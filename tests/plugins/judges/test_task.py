"""Tasks whose answers are compared: rewards in a group, held out, and where judgements are lost."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from es_cookbook.common.errors import DataError
from es_cookbook.engines.base import LogprobsRequest, SampleRequest
from es_cookbook.evolution.genome import Genome, Term
from es_cookbook.plugins.judges.judges import BaseJudge
from es_cookbook.plugins.judges.task import JudgedTask
from es_cookbook.plugins.judges.tournament import Tournament
from es_cookbook.population.sampler import PopulationSampler
from es_cookbook.rl.rewards.matching import Exact
from es_cookbook.rl.rollouts import env_metrics, lost_rollouts, rollout_metrics
from es_cookbook.rl.types import SamplingParams, Trajectory
from tests.fakes import FakeEngine
from tests.recipe_problems import write_rows
from tools.small_model import build_tokenizer

GENOMES = [Genome((Term(seed, 0.1),)) for seed in range(4)]
TEMPLATE = "{question}/{first}/{second}/"


class Judging(FakeEngine):
    """Genome i answers i; the base answers 2, and prefers the larger number, or says nothing."""

    def __init__(self, speechless: str = "none", capacity: int = 1000, mass: float = 1.0) -> None:
        super().__init__(capacity, self._number)
        self.tokenizer = build_tokenizer("0123456789q/AB")
        self.speechless, self.mass = speechless, mass
        self.judged: list[str] = []

    def _number(self, who: Genome | str, request: SampleRequest) -> str:
        return str(GENOMES.index(who)) if isinstance(who, Genome) else "2"

    async def logprobs(self, request: LogprobsRequest) -> list[float]:
        assert request.target == "base"
        question, first, second, _ = self.decoded(request.prompt_T).split("/")
        self.judged.append(question)
        if self.speechless in (first, second):
            return [-20.0]
        wins = int(first or -1) > int(second or -1)
        is_winner = (self.decoded(request.continuation_T) == "A") == wins
        return [math.log(self.mass * (0.8 if is_winner else 0.2))]

    def decoded(self, tokens_T: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(tokens_T)))


def task(tmp_path: Path, **options: Any) -> JudgedTask:
    rows = [{"question": f"q{i}", "answer": "3"} for i in range(8)]
    source = write_rows(tmp_path / "rows.jsonl", rows)
    defaults: dict[str, Any] = {
        "judge": BaseJudge(template=TEMPLATE),
        "problems_per_generation": 1,
        "num_test": 1,
    }
    return JudgedTask(source=source, test_fraction=0.5, **{**defaults, **options})


def sampler(engine: FakeEngine, lost: float = 0.1) -> PopulationSampler:
    return PopulationSampler(engine, sampling=SamplingParams(), max_failed_fraction=lost)


async def test_the_reward_is_the_win_rate_and_the_tasks_own_is_measured(tmp_path: Path) -> None:
    engine = Judging()
    built = await task(tmp_path, reward=Exact(), full_reward=1.0)(engine.tokenizer)
    await built.train.validate(64)
    (group,) = await sampler(engine).rollout(0, built.train.get_batch(0), GENOMES)
    assert [rewards_K[0] for rewards_K in group.rewards_G_K] == pytest.approx(
        [0.2, (0.8 + 0.4) / 3, (1.6 + 0.2) / 3, 0.8]
    )
    assert len(engine.judged) == 24, "six pairs, two orders, two verdicts"
    metrics = env_metrics([group])
    assert metrics["env/all/task_reward"] == 0.25
    assert metrics["env/all/win_rate"] == pytest.approx(0.5)
    assert (metrics["env/all/judgements"], metrics["env/all/answers"]) == (12, 4)
    assert (metrics["env/all/first_wins"], metrics["env/all/swap_changes"]) == (0.5, 0)


async def test_the_tasks_own_reward_counts_by_its_weight(tmp_path: Path) -> None:
    engine = Judging()
    built = await task(tmp_path, reward=Exact(), task_weight=2.0)(engine.tokenizer)
    (group,) = await sampler(engine).rollout(0, built.train.get_batch(0), GENOMES)
    assert [rewards_K[0] for rewards_K in group.rewards_G_K] == pytest.approx([0.2, 0.4, 0.6, 2.8])


@pytest.mark.parametrize("capacity", [1, 3, 1000])
async def test_blocks_of_genomes_are_compared_with_others(tmp_path: Path, capacity: int) -> None:
    engine = Judging(capacity=capacity)
    built = await task(tmp_path)(engine.tokenizer)
    (group,) = await sampler(engine).rollout(0, built.train.get_batch(0), GENOMES)
    assert [rewards_K[0] for rewards_K in group.rewards_G_K] == pytest.approx([0.2, 0.4, 0.6, 0.8])


async def test_held_out_the_centre_is_compared_with_the_base(tmp_path: Path) -> None:
    engine = Judging()
    built = await task(tmp_path)(engine.tokenizer)
    (group,) = await sampler(engine).rollout_centre(built.test_P, SamplingParams())
    assert group.rewards_G_K == [[0.5]], "the same text, about which nobody is asked"
    assert not engine.judged
    (group,) = await sampler(engine).rollout(0, built.test_P, GENOMES[3:])
    assert group.rewards_G_K == [[pytest.approx(0.8)]]


async def test_the_centres_answer_can_be_the_one_opponent(tmp_path: Path) -> None:
    engine = Judging()
    built = await task(tmp_path, tournament=Tournament(pattern="centre"))(engine.tokenizer)
    (group,) = await sampler(engine).rollout(0, built.train.get_batch(0), GENOMES)
    assert [rewards_K[0] for rewards_K in group.rewards_G_K] == pytest.approx([0.2, 0.2, 0.5, 0.8])
    assert rollout_metrics(group, 0, 0)["judgements"] == 6


async def test_an_answer_that_was_not_judged_is_lost_and_not_worth_nothing(tmp_path: Path) -> None:
    engine = Judging(speechless="1")
    built = await task(tmp_path)(engine.tokenizer)
    (group,) = await sampler(engine, lost=0.5).rollout(0, built.train.get_batch(0), GENOMES)
    rewards = [rewards_K[0] for rewards_K in group.rewards_G_K]
    assert math.isnan(rewards[1])
    assert [rewards[0], *rewards[2:]] == pytest.approx([0.2, 0.5, 0.8])
    (lost,) = lost_rollouts([group])
    assert lost.reason.startswith("no judgement of this answer: the base gave no verdict")
    assert env_metrics([group])["env/all/lost_judgements"] == 0.5


async def test_what_was_lost_before_is_not_compared(tmp_path: Path) -> None:
    engine = Judging()
    built = await task(tmp_path, reward=_fails_on_one)(engine.tokenizer)
    (group,) = await sampler(engine, lost=0.5).rollout(0, built.train.get_batch(0), GENOMES)
    finished = [isinstance(each[0], Trajectory) for each in group.trajectories_G_K]
    assert finished == [True, False, True, True]
    assert rollout_metrics(group, 0, 0)["answers"] == 3
    assert group.rewards_G_K[3] == [pytest.approx(0.8)]


def _fails_on_one(text: str, row: object) -> float:
    return {"0": 0.0, "2": 0.0, "3": 0.0, "": 0.0}[text]


async def test_a_row_without_what_the_judge_is_told_is_named(tmp_path: Path) -> None:
    judge = BaseJudge(template="{topic}{first}{second}")
    with pytest.raises(DataError, match=r"rows\.jsonl, line \d: .*'topic' is missing"):
        await task(tmp_path, judge=judge)(FakeEngine().tokenizer)
