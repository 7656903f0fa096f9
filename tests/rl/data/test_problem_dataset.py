"""Batches as a pure function of the generation."""

import functools
from collections import Counter
from pathlib import Path

import pytest

from es_cookbook.common.errors import ConfigError, DataError
from es_cookbook.rl.data.problem_dataset import ChangedProblem, ProblemDataset, deal, gather
from es_cookbook.rl.problem_env import ProblemGroupBuilder
from es_cookbook.rl.types import Datasets, EnvGroupBuilder, Observation, TrajectoryGroup
from es_cookbook.runs.directory.directory import keep_trained_on
from tests.fakes import Word, trajectory


def _builder(i: int, gold: str | None = "yes") -> ProblemGroupBuilder:
    return ProblemGroupBuilder(functools.partial(Word, Observation((i,))), f"problem {i}", gold)


def _names(dataset: ProblemDataset, generation: int) -> list[str]:
    return [builder.name for builder in dataset.get_batch(generation)]


def test_every_epoch_has_every_problem_once_in_its_own_order() -> None:
    dataset = ProblemDataset([_builder(i) for i in range(12)], 4, seed=0)
    first = [name for generation in range(3) for name in _names(dataset, generation)]
    second = [name for generation in range(3, 6) for name in _names(dataset, generation)]
    assert Counter(first) == Counter(second) == Counter({f"problem {i}": 1 for i in range(12)})
    assert first != second


def test_batch_is_a_function_of_the_generation_alone() -> None:
    builders = [_builder(i) for i in range(7)]
    in_order = ProblemDataset(builders, 3, seed=1)
    batches = [_names(in_order, generation) for generation in range(9)]
    backwards = ProblemDataset(builders, 3, seed=1)
    assert [_names(backwards, generation) for generation in reversed(range(9))] == batches[::-1]
    other = ProblemDataset(builders, 3, seed=2)
    assert [_names(other, generation) for generation in range(9)] != batches


async def test_validate_names_the_problem_whose_gold_earns_too_little() -> None:
    await ProblemDataset([_builder(0), _builder(1, None)], 1, seed=0).validate(64)
    with pytest.raises(DataError, match="problem 2: its own solution earns 0 of 1"):
        await ProblemDataset([_builder(0), _builder(2, "no")], 1, seed=0).validate(64)


async def test_validate_names_the_problem_whose_prompt_fills_the_context() -> None:
    long = ProblemGroupBuilder(functools.partial(Word, Observation((7,) * 64)), "line 3")
    await ProblemDataset([_builder(0), long], 1, seed=0).validate(65)
    sentence = "line 3: its prompt of 64 tokens leaves no room .* of 64 tokens.*max_model_len"
    with pytest.raises(DataError, match=sentence):
        await ProblemDataset([_builder(0), long], 1, seed=0).validate(64)


def test_a_changed_problem_passes_on_all_that_a_problem_says() -> None:
    said = {name for name in vars(EnvGroupBuilder) if not name.startswith("_")} - {"make_envs"}
    assert said | {"gold", "usual_stop"} <= {*vars(ChangedProblem)}


async def test_a_batch_is_dealt_out_to_pairs_and_what_they_bring_is_gathered() -> None:
    problems_P = [_builder(i) for i in range(4)]
    rows = deal(problems_P, 2)
    asked = [
        [await env.initial_observation() for env in (await row.make_envs(4)).envs] for row in rows
    ]
    assert [[each.tokens_T for each in of_row] for of_row in asked] == [
        [(0,), (0,), (1,), (1,)],
        [(2,), (2,), (3,), (3,)],
    ]
    groups_R = [
        TrajectoryGroup([[trajectory(10.0 * r + g)] for g in range(4)]) for r in range(len(rows))
    ]
    found = [group.rewards_G_K for group in gather(groups_R, problems_P)]
    assert found == [[[0], [1]], [[2], [3]], [[10], [11]], [[12], [13]]]
    with pytest.raises(ConfigError, match="their number must be a multiple of 2"):
        deal(problems_P[:3], 2)


def test_other_problems_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for generations, count in ((0, 2), (3, 2), (3, 3)):
        problems = [_builder(i) for i in range(count)]
        keep_trained_on(tmp_path, Datasets(ProblemDataset(problems, 1, seed=0)), generations)
    assert caplog.text.count("are not those of the 3 generations before") == 1
