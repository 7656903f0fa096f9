"""The centre is measured greedily on held-out problems; what is lost is left out and said."""

import dataclasses
from collections.abc import Sequence

import pytest

from es_cookbook import Grade, Observation, PopulationSampler, ProblemEnv, SamplingParams, evaluate
from es_cookbook.engines.base import SampleRequest
from es_cookbook.evolution.genome import Genome
from es_cookbook.population.results import wilson_interval
from es_cookbook.rl.problem_env import ProblemGroupBuilder
from es_cookbook.rl.types import ANSWER
from es_cookbook.runs.tracking.live import line_of
from tests.fakes import FakeEngine, Word


class Even(ProblemEnv):
    """Pays for even answers; cannot read words."""

    def grade(self, text: str) -> Grade:
        even = int(text) % 2 == 0
        return Grade(2.0 * even, {"correct": float(even)})


class Silent(Even):
    """Reports whether an answer is right only where that can be read."""

    def grade(self, text: str) -> Grade:
        return Grade(0.0) if text == "word" else super().grade(text)


def problems(*tokens: int) -> Sequence[ProblemGroupBuilder]:
    return [
        ProblemGroupBuilder(
            lambda t=t: Even(Observation((t,))), str(t), problem_tags=("small",) * (t < 3)
        )
        for t in tokens
    ]


def sampler(engine: FakeEngine, max_failed_fraction: float = 0.3) -> PopulationSampler:
    warm = SamplingParams(max_tokens=5, temperature=1.0)
    return PopulationSampler(
        engine, sampling=warm, attempts=4, max_failed_fraction=max_failed_fraction
    )


def answer(who: Genome | str, request: SampleRequest) -> str:
    (token,) = request.observation.tokens_T
    return "word" if token == 9 else str(token)


async def test_a_metric_has_the_number_of_the_answers_that_report_it() -> None:
    """Once the mean of those was told as one of all, and an answer that breaks helped it."""
    asked = [
        ProblemGroupBuilder(lambda t=t: Silent(Observation((t,))), str(t)) for t in (2, 4, 1, 9)
    ]
    metrics = await evaluate(sampler(FakeEngine(answer=answer)), asked)
    assert (metrics["test/env/all/correct"], metrics["test/problems"]) == (2 / 3, 4)
    assert metrics["test/reported/env/all/correct"] == 3
    low, high = (metrics[f"test/{end}/env/all/correct"] for end in ("low", "high"))
    assert (low, high) == wilson_interval(2, 3)
    assert "test/reported/reward/mean" not in metrics
    told = f"held-out correct 0.667 (of 3 answers, {low:.3f} to {high:.3f})"
    assert told in line_of("finished", metrics).split("  ")


async def test_the_centre_is_measured_greedily_by_tag() -> None:
    engine = FakeEngine(answer=answer)
    metrics = await evaluate(sampler(engine), problems(1, 2, 4, 6))
    within = {key: metrics.pop(key) for key in [*metrics] if "/low/" in key or "/high/" in key}
    assert within == {
        "test/low/reward/mean": 0.5,
        "test/high/reward/mean": 2.0,
        "test/low/env/all/correct": wilson_interval(3, 4)[0],
        "test/high/env/all/correct": wilson_interval(3, 4)[1],
    }
    assert metrics == {
        "test/problems": 4,
        "test/reward/mean": 1.5,
        "test/env/all/correct": 0.75,
        "test/env/small/correct": 0.5,
        "test/rollouts/failed": 0.0,
        "test/rollouts/mean_tokens": 1.0,
        "test/rollouts/p95_tokens": 1,
        "test/rollouts/truncated": 0.0,
    }
    assert [(who, request.params) for who, request in engine.requests] == [
        ("centre", SamplingParams(max_tokens=5))
    ] * 4


def one_of_four(who: Genome | str, request: SampleRequest) -> str:
    """Even in one of a problem's attempts, for 1 in none and for 2 in all; 9 loses one."""
    (token,) = request.observation.tokens_T
    attempts = SEEDS.setdefault(token, [])
    attempts.append(request.seed)
    if token == 9 and len(attempts) == 1:
        return "word"
    return {1: "1", 2: "2"}.get(token, "2" if len(attempts) == 4 else "1")


SEEDS: dict[int, list[int]] = {}


async def test_several_attempts_at_a_temperature_give_pass_at_k() -> None:
    SEEDS.clear()
    engine = FakeEngine(answer=one_of_four)
    metrics = await evaluate(sampler(engine), problems(1, 2, 4, 9), attempts=4, temperature=0.7)
    # Solved: 0 of 4, 4 of 4, 1 of 4, 1 of 3 that were left.
    assert metrics["test/pass@1"] == pytest.approx((0 + 1 + 1 / 4 + 1 / 3) / 4)
    assert metrics["test/pass@2"] == pytest.approx((0 + 1 + 1 / 2 + 2 / 3) / 4)
    assert metrics["test/pass@4"] == pytest.approx((0 + 1 + 1) / 3), "a problem has three left"
    assert metrics["test/env/all/correct"] == pytest.approx(6 / 15)
    assert metrics["test/rollouts/failed"] == 1.0
    assert {request.params.temperature for _, request in engine.requests} == {0.7}
    assert all(len(set(seeds)) == 4 for seeds in SEEDS.values()), "attempts differ"
    first = SEEDS.copy()
    SEEDS.clear()
    again = await evaluate(sampler(engine), problems(1, 2, 4, 9), attempts=4, temperature=0.7)
    assert (SEEDS, again) == (first, metrics), "and are the same when measured again"
    words = [ProblemGroupBuilder(lambda: Word(Observation((1,))), "yes")]
    metrics = await evaluate(sampler(FakeEngine(answer=lambda who, request: "yes")), words, 4, 0.7)
    assert metrics["test/pass@4"] == 1.0, "rewards of 0 and 1 tell it, too"


class Read(Even):
    """Says which answer it read."""

    def grade(self, text: str) -> Grade:
        return dataclasses.replace(super().grade(text), logs={ANSWER: text})


async def test_the_answer_of_most_attempts_is_measured_where_envs_say_what_they_read() -> None:
    said = iter("122211221113")

    def one_by_one(who: Genome | str, request: SampleRequest) -> str:
        return next(said)

    builders = [
        ProblemGroupBuilder(lambda t=t: Read(Observation((t,))), str(t)) for t in range(1, 4)
    ]
    metrics = await evaluate(sampler(FakeEngine(answer=one_by_one)), builders, 4, 1.0)
    assert metrics["test/maj@4"] == pytest.approx((1 + 1 / 2 + 0) / 3), "of a tie, the half"
    assert metrics["test/low/maj@4"] <= metrics["test/maj@4"] <= metrics["test/high/maj@4"]
    assert "test/maj@2" not in metrics, "of two attempts most are both, or any"
