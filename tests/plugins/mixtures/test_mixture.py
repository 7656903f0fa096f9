"""Mixtures: shares, tags and limits of parts; and choices that follow from results alone."""

import functools
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any
from unittest.mock import AsyncMock

import chz
import pytest
from typing_extensions import override

from es_cookbook import EnvGroupBuilder, Grade, Observation, RLDataset, RLDatasetBuilder
from es_cookbook.common.errors import ConfigError, DataError
from es_cookbook.evolution.schedules import Table
from es_cookbook.plugins.mixtures import mixture
from es_cookbook.plugins.mixtures.mixture import Mixture, Part, easy_pool
from es_cookbook.plugins.mixtures.selection import Curriculum, Filter, Replay, Stream, quotas
from es_cookbook.rl.data.problem_dataset import ProblemDataset
from es_cookbook.rl.problem_env import ProblemGroupBuilder
from es_cookbook.rl.types import Action, Datasets, ProblemResult, Tokenizer, TrajectoryGroup
from tests.fakes import FakeEngine, Word, trajectory


def _problem(first: int, i: int, tags: tuple[str, ...] = ()) -> ProblemGroupBuilder:
    prompt = Observation((first, *(10 + int(digit) for digit in str(i))))
    return ProblemGroupBuilder(functools.partial(Word, prompt), f"{first}/{i}", "yes", tags)


@chz.chz
class Numbers(RLDatasetBuilder):
    """Problems 0, 1, … of a kind."""

    kind: int = chz.field(default=1, doc="first token of the prompts")
    size: int = chz.field(default=8, doc="problems")
    held_out: int = chz.field(default=0, doc="more problems, for the test")
    halves: bool = chz.field(default=False, doc="tag odd and even ones")

    @override
    async def __call__(self, tokenizer: Tokenizer) -> Datasets:
        tags = (lambda i: ("odd",) if i % 2 else ("even",)) if self.halves else lambda _: ()
        problems = [_problem(self.kind, i, tags(i)) for i in range(self.size + self.held_out)]
        train, test_P = problems[: self.size], problems[self.size :]
        return Datasets(ProblemDataset(train, 1, seed=0, held_out=test_P), test_P)


async def _built(*parts: Part, **fields: Any) -> RLDataset:
    return (await Mixture(parts=parts, **fields)(FakeEngine().tokenizer)).train


def _names(batch_P: Sequence[EnvGroupBuilder]) -> list[str]:
    return [builder.name for builder in batch_P]  # pyright: ignore


def _kinds(batch_P: Sequence[EnvGroupBuilder]) -> Counter[str]:
    return Counter(name.partition("/")[0] for name in _names(batch_P))


def _groups(solved_P: Sequence[float]) -> list[TrajectoryGroup]:
    """One genome's one attempt at each problem."""
    return [TrajectoryGroup([[trajectory(solved)]]) for solved in solved_P]


def _go(dataset: RLDataset, generations: int, solved: Any) -> list[list[str]]:
    """Batches of a run in which `solved` says how well a problem goes, by its name."""
    batches: list[list[str]] = []
    for generation in range(generations):
        batches.append(_names(dataset.get_batch(generation)))
        results_P = dataset.results(generation, _groups([solved(name) for name in batches[-1]]))
        dataset.tell(generation, results_P)
    return batches


@pytest.mark.parametrize("order", ["weighted", "balanced", "concatenate"])
async def test_without_weights_every_problem_comes_once_per_epoch(order: str) -> None:
    parts = Part(dataset=Numbers(kind=1, size=12)), Part(dataset=Numbers(kind=2, size=4))
    dataset = await _built(*parts, order=order, problems_per_generation=4)
    assert len(dataset) == 16
    batches = [dataset.get_batch(generation) for generation in range(8)]
    epochs = [Counter(name for b in batches[i : i + 4] for name in _names(b)) for i in (0, 4)]
    assert epochs[0] == epochs[1] == Counter(dict.fromkeys(epochs[0], 1))
    assert len(epochs[0]) == 16
    if order != "concatenate":
        assert [_kinds(batch) for batch in batches] == [Counter({"1": 3, "2": 1})] * 8


@pytest.mark.slow
async def test_weights_say_the_shares_and_a_table_moves_them() -> None:
    easy = Part(dataset=Numbers(kind=1, size=50))
    hard = Part(dataset=Numbers(kind=2, size=5))
    table = Table(generations=(0, 4), factors=(1.0, 0.0))
    dataset = await _built(*easy_pool(easy, hard, table), problems_per_generation=8)
    shares = [_kinds(dataset.get_batch(generation))["1"] for generation in range(6)]
    assert shares == [8, 6, 4, 2, 0, 0]


async def test_parts_keep_tags_test_problems_and_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Word, "close", close := AsyncMock())
    limited = Part(dataset=Numbers(kind=1, held_out=2, halves=True), tag="first", max_tokens=3)
    parts = limited, Part(dataset=Numbers(kind=2, held_out=1), tag="second")
    datasets = await Mixture(parts=parts, problems_per_generation=16)(FakeEngine().tokenizer)
    assert [builder.tags for builder in datasets.test_P] == [
        ("first", "even"),
        ("first", "odd"),
        ("second",),
    ]
    await datasets.train.validate(context_length=100)
    with pytest.raises(DataError, match="1/0: its prompt of 2 tokens leaves no room"):
        await datasets.train.validate(context_length=2)
    groups = [await builder.make_envs(1) for builder in datasets.test_P]
    for group, most in zip(groups, (3, 3, None), strict=True):
        (env,) = group.envs
        env.policy = None  # pyright: ignore
        assert (await env.initial_observation()).max_tokens == most
        result = await env.step(Action((1,), "yes", "stop"))
        assert result == Grade(1.0)
        await group.close()
    assert close.await_count == 3


async def test_a_curriculum_gives_more_to_what_is_half_solved() -> None:
    parts = Part(dataset=Numbers(kind=1, size=100, halves=True)), Part(dataset=Numbers(kind=2))
    curriculum = Curriculum(window=2, floor=0.1)
    dataset = await _built(*parts, problems_per_generation=54, curriculum=curriculum)

    def solved(name: str) -> float:
        kind, _, number = name.partition("/")
        return 1.0 if kind == "2" else 0.5 * (int(number) % 2)

    batches = _go(dataset, 3, solved)
    odd = [sum(n.startswith("1/") and int(n[2:]) % 2 for n in batch) for batch in batches]
    assert odd[0] == 25
    assert all(number in (48, 49) for number in odd[1:])
    shares = dataset.metrics()
    assert math.isclose(shares["data/share/odd"], 50 / (50 + 5 + 0.8))
    assert math.isclose(sum(shares.values()), 1)


async def test_a_filter_leaves_out_what_all_or_none_solve_and_tries_it_again() -> None:
    dataset = await _built(
        Part(dataset=Numbers(size=8)), problems_per_generation=4, filter=Filter(generations=3)
    )
    batches = _go(dataset, 12, lambda name: float(name in ("1/0", "1/1", "1/2")) or 0.5)
    times = Counter(name for batch in batches for name in batch)
    assert all(times[name] < min(times["1/5"], times["1/6"]) for name in ("1/0", "1/1", "1/2"))
    for name in ("1/0", "1/1", "1/2"):
        first, second = [g for g, batch in enumerate(batches) if name in batch][:2]
        assert second - first > 3


async def test_replay_brings_back_what_is_most_worth_it() -> None:
    replay = Replay(fraction=0.5, warmup=2, exploration=0.0)
    dataset = await _built(
        Part(dataset=Numbers(size=100)), problems_per_generation=10, replay=replay
    )

    def worth(name: str) -> float:
        number = int(name[2:])
        return 0.5 if number % 10 == 0 else 0.01 * number

    batches = _go(dataset, 4, worth)
    seen = {name for batch in batches[:2] for name in batch}
    best = sorted(seen, key=lambda name: -4 * worth(name) * (1 - worth(name)))[:5]
    values = sorted(4 * worth(name) * (1 - worth(name)) for name in batches[2][:5])
    assert values == sorted(4 * worth(name) * (1 - worth(name)) for name in best)
    assert not set(batches[2][:5]) & set(batches[2][5:])
    assert dataset.metrics()["data/replayed"] == 5


async def test_batches_follow_from_what_was_told_alone() -> None:
    parts = Part(dataset=Numbers(kind=1, size=60)), Part(dataset=Numbers(kind=2, size=30))
    curriculum, replay = Curriculum(), Replay(warmup=1)
    settings = {
        "problems_per_generation": 8,
        "curriculum": curriculum,
        "filter": Filter(),
        "replay": replay,
    }
    unbroken = await _built(*parts, **settings)
    batches = _go(unbroken, 6, lambda name: len(name) % 2 * 0.5)
    again = await _built(*parts, **settings)
    for generation in range(3):
        solved_P = [len(name) % 2 * 0.5 for name in batches[generation]]
        again.tell(generation, unbroken.results(generation, _groups(solved_P)))
    assert _names(again.get_batch(3)) == batches[3]
    other = await _built(*parts, **settings)
    other.tell(0, again.results(0, _groups([1.0] * 8)))
    assert [_names(other.get_batch(g)) for g in range(3)] != batches[:3]


async def test_results_of_other_problems_are_refused_unless_given() -> None:
    dataset = await _built(Part(dataset=Numbers()), problems_per_generation=2, replay=Replay())
    others = [ProblemResult("abc", 0.5, 0.5)] * 2
    with pytest.raises(DataError, match="generation 0: the recorded problems are others than"):
        dataset.tell(0, others)
    dataset.tell(0, others, given=True)


async def test_one_answer_to_each_problem_is_refused_where_shares_are_needed() -> None:
    for chosen in ({"filter": Filter()}, {"replay": Replay()}):
        dataset = await _built(Part(dataset=Numbers()), **chosen)
        dataset.check_rollouts(2)
        with pytest.raises(ConfigError, match="with one answer to each"):
            dataset.check_rollouts(1)
    (await _built(Part(dataset=Numbers()), filter=Filter(solved_by_none=False))).check_rollouts(1)


async def test_a_problem_in_training_and_test_of_two_parts_is_refused() -> None:
    parts = Part(dataset=Numbers(size=4, held_out=2)), Part(dataset=Numbers(size=6))
    with pytest.raises(DataError, match=r"1/4: .* held out in one part and trained on"):
        await _built(*parts)


async def test_a_metric_that_no_gold_answer_reports_is_refused() -> None:
    for metric in ("correct", "reward"):
        await _built(Part(dataset=Numbers()), solved_metric=metric)
    with pytest.raises(ConfigError, match=r"dataset.solved_metric must be .*, found 'solved'"):
        await _built(Part(dataset=Numbers()), solved_metric="solved")


@pytest.mark.parametrize("from_generation", [0, 5])
async def test_a_metric_may_be_that_of_a_later_part(
    from_generation: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mixture, "told_golds", AsyncMock(return_value=[]))  # None are known.
    later = (
        Table(generations=(0, from_generation), factors=(0.0, 1.0)) if from_generation else Table()
    )
    parts = Part(dataset=Numbers()), Part(dataset=Numbers(kind=2), schedule=later)
    dataset = await _built(
        *parts, solved_metric="later", replay=Replay(), problems_per_generation=8
    )
    if from_generation:
        assert len(_go(dataset, 2, lambda _: 0.5)) == 2
    else:
        with pytest.raises(ConfigError, match=r"solved_metric must be .*, found 'later'"):
            _go(dataset, 2, lambda _: 0.5)


LATER_NOTHING = Part(dataset=Numbers(), schedule=Table(generations=(0, 9), factors=(1.0, 0.0)))


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"parts": ()}, "parts must be one or more data sets"),
        ({"order": "balanced", "curriculum": Curriculum()}, "order=balanced takes every problem"),
        ({"parts": (LATER_NOTHING,)}, "all parts have weight 0 in generation 9"),
    ],
)
def test_mixtures_that_cannot_work_are_refused(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        Mixture(**{"parts": (Part(dataset=Numbers()),), **fields})


@pytest.mark.parametrize("offset", [0.0, 0.3, 0.999])
def test_quotas_fill_the_batch_and_are_within_one_of_their_share(offset: float) -> None:
    weights = [0.0, 3.0, 0.5, 0.25, 0.0, 1.25, 0.0]
    found = quotas(weights, 32, offset)
    assert sum(found) == 32
    assert [found[i] for i in (0, 4, 6)] == [0, 0, 0]
    for quota, weight in zip(found, weights, strict=True):
        assert abs(quota - 32 * weight / 5) < 1


def test_a_stream_of_nothing_usable_gives_all() -> None:
    stream = Stream(lambda epoch: [0, 1, 2] if epoch % 2 else [2, 1, 0], 3)
    assert stream.take(2, lambda i: i == 1) == [1, 1]
    assert len(stream.take(4, lambda _: False)) == 4
    again = Stream(lambda epoch: [0, 1, 2] if epoch % 2 else [2, 1, 0], 3)
    assert again.take(2, lambda _: False) == [0, 1], "after one epoch without any"
