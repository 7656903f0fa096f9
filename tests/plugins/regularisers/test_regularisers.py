"""KL to the base and preference pairs, on a real model and on literals."""

import math
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest

from es_cookbook.common.errors import DataError
from es_cookbook.engines.base import Engine, LogprobsRequest
from es_cookbook.engines.torch.engine import TorchEngineBuilder
from es_cookbook.evolution.genome import Genome, Step, Term
from es_cookbook.evolution.spaces.low_rank import LowRank
from es_cookbook.plugins.regularisers.kl import KLProblem, KLToBase
from es_cookbook.plugins.regularisers.preference import PairProblem, PreferencePairs
from es_cookbook.population.sampler import PopulationSampler
from es_cookbook.rl.rollouts import env_metrics, lost_rollouts
from es_cookbook.rl.types import EnvGroupBuilder, Observation, SamplingParams, TrajectoryGroup
from tests.fakes import FakeEngine, Pieces, problem
from tests.recipe_problems import write_rows
from tests.tiny_run import write_tiny_model

PROMPT = Observation((5, 6, 7))
PAIR = (5, 6, 7), (10, 11, 12), (20, 21)


@pytest.fixture(scope="module")
async def engine(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[Engine]:
    model = write_tiny_model(tmp_path_factory.mktemp("model"))
    built = await TorchEngineBuilder(num_lanes=1)(model_name=str(model), search_space=LowRank())
    yield built
    await built.close()


async def rollout(
    engine: Engine, builder: EnvGroupBuilder, *genomes: Genome, attempts: int = 1
) -> TrajectoryGroup:
    greedy = SamplingParams(max_tokens=3)
    sampler = PopulationSampler(engine, sampling=greedy, attempts=attempts, max_failed_fraction=1)
    (group,) = await sampler.rollout(0, [builder], genomes)
    return group


def noisy(seed: int, coefficient: float) -> Genome:
    return Genome((Term(seed, coefficient),))


async def test_the_base_has_no_kl_and_a_farther_genome_has_more(engine: Engine) -> None:
    genomes = [Genome(()), noisy(1, 0.05), noisy(1, 0.2)]
    group = await rollout(engine, KLProblem(PROMPT, 12), *genomes, attempts=8)
    rewards_G = [math.fsum(rewards_K) / 8 for rewards_K in group.rewards_G_K]
    assert rewards_G[0] == pytest.approx(0, abs=1e-6)
    assert rewards_G[0] > rewards_G[1] > rewards_G[2]
    assert env_metrics([group])["env/kl/kl"] == pytest.approx(-sum(rewards_G) / 3)


async def test_answers_are_drawn_at_temperature_1_though_the_run_is_greedy() -> None:
    engine = FakeEngine()
    await rollout(engine, KLProblem(PROMPT, 9), noisy(1, 0.1), noisy(2, 0.1), attempts=2)
    params = {request.params for _, request in engine.requests}
    assert params == {SamplingParams(max_tokens=9, temperature=1.0, logprobs=True)}
    seeds = {(who, request.seed) for who, request in engine.requests}
    assert len(seeds) == 4 and len({seed for _, seed in seeds}) == 2, "common random numbers"


async def test_the_batchs_own_problems_are_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pieces, "close", close := AsyncMock())
    added = KLToBase(weight=1.0, problems_per_generation=2)(FakeEngine().tokenizer, 64, 0)
    batch_P = [problem(n, "train") for n in range(3)]
    problems = list(added(7, batch_P))
    assert problems == [KLProblem(each, 32) for each in batch_P[:2]]
    engine = FakeEngine()
    group = await rollout(engine, problems[1], Genome(()))
    assert lost_rollouts([group]) == [] and group.tags == ("kl",)
    close.assert_awaited_once()  # A program that waits for its answer would hold its turn.


async def margins(engine: Engine, *targets: Any) -> list[float]:
    found: list[float] = []
    for who in targets:
        chosen, rejected = [
            await engine.logprobs(LogprobsRequest(who, PAIR[0], answer_T)) for answer_T in PAIR[1:]
        ]
        found.append(sum(chosen) - sum(rejected))
    return found


async def test_a_pair_is_scored_by_genome_and_base_and_nothing_is_sampled(engine: Engine) -> None:
    genomes = [noisy(1, 0.2), noisy(2, 0.2), Genome(())]
    moved = Step((Term(9, 0.3),))
    await engine.apply(moved)  # The base stays what it was.
    group = await rollout(engine, PairProblem(*PAIR, 0.5), *genomes, attempts=2)
    await engine.load(genomes)
    *own_G, base = await margins(engine, 0, 1, 2, "base")
    for own, rewards_K in zip(own_G, group.rewards_G_K, strict=True):
        expected = -math.log1p(math.exp(-0.5 * (own - base)))
        assert rewards_K == pytest.approx([expected] * 2, abs=1e-5)
    metrics = env_metrics([group])
    assert metrics["env/preference/margin"] == pytest.approx(sum(own_G) / 3, abs=1e-4)
    assert metrics["env/preference/preferred"] == pytest.approx(sum(m > 0 for m in own_G) / 3)
    assert sum(t.num_tokens for ts in group.trajectories_G_K for t in ts if t) == 0  # pyright: ignore
    await engine.restore([])


class Deaf(FakeEngine):
    """Fails to score for its first genome; counts what the base scores."""

    asked_base = 0

    async def logprobs(self, request: LogprobsRequest) -> list[float]:
        self.asked_base += request.target == "base"
        if request.target == 0:
            raise OSError("no answer")
        return await super().logprobs(request)


async def test_a_lost_scoring_is_a_lost_rollout_and_the_base_scores_once() -> None:
    engine = Deaf()
    group = await rollout(engine, PairProblem(*PAIR, 0.1), *[noisy(s, 1.0) for s in range(5)])
    assert [math.isnan(reward) for (reward,) in group.rewards_G_K] == [True] + [False] * 4
    assert engine.asked_base == 2, "once for each answer, not for each genome"
    assert engine.requests == []


def pairs_of(source: str, **fields: Any) -> Sequence[PairProblem]:
    builder = PreferencePairs(source=source, weight=1.0, **fields)
    added = builder(FakeEngine().tokenizer, 64, 3)
    return [p for p in added(0, []) if isinstance(p, PairProblem)]


async def test_rows_become_pairs_of_tokens(tmp_path: Path) -> None:
    row = {"prompt": "a", "chosen": "b", "rejected": "c!"}
    source = write_rows(tmp_path / "pairs.jsonl", [row])
    (found,) = pairs_of(source, problems_per_generation=1, beta=0.3)
    letters = [ord(letter) - 32 for letter in "abc"]
    assert found == PairProblem((letters[0],), (letters[1],), (letters[2], 1), 0.3)
    tokenizer = FakeEngine().tokenizer
    tokenizer.eos_token = "!"
    builder = PreferencePairs(source=source, weight=1.0, problems_per_generation=1)
    (ended,) = builder(tokenizer, 64, 0)(0, [])
    assert ended == PairProblem((letters[0],), (letters[1], 1), (letters[2], 1), 0.1), "one end"


@pytest.mark.parametrize("kind", ["kl", "preference"])
async def test_rows_come_as_a_function_of_the_generation(tmp_path: Path, kind: str) -> None:
    rows = [{"prompt": letter, "chosen": "b", "rejected": "c"} for letter in "defgh"]
    source = write_rows(tmp_path / "rows.jsonl", rows)
    regulariser = (
        KLToBase(weight=1.0, source=source, problems_per_generation=2)
        if kind == "kl"
        else PreferencePairs(weight=1.0, source=source, problems_per_generation=2)
    )
    added, again, other = (regulariser(FakeEngine().tokenizer, 64, seed) for seed in (0, 0, 1))
    batches = [list(added(generation, [])) for generation in range(5)]
    assert [list(again(generation, [])) for generation in reversed(range(5))] == batches[::-1]
    assert [list(other(generation, [])) for generation in range(5)] != batches
    seen = [p for batch in batches for p in batch]
    assert all(seen.count(p) == 2 for p in seen) and len(seen) == 10, "two epochs"


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        ([{"prompt": "a", "chosen": "b", "rejected": 3}], "'rejected' must be text"),
        ([{"prompt": "a", "chosen": "b", "rejected": "b"}], "line 1: .* are the same tokens"),
    ],
)
def test_unusable_pairs_are_named(tmp_path: Path, rows: list[Any], sentence: str) -> None:
    with pytest.raises(DataError, match=sentence):
        pairs_of(write_rows(tmp_path / "pairs.jsonl", rows))
