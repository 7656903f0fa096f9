"""Problems: solvable, solved, seeded, disjoint."""

from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from es_cookbook.recipes.countdown.problems import Problem, Split, generate_problems, solve
from es_cookbook.rl.rewards.arithmetic import evaluate


@given(st.lists(st.integers(1, 30), min_size=2, max_size=4), st.integers(1, 99))
def test_solutions_use_each_number_once_and_hit_the_target(numbers: list[int], target: int) -> None:
    solution = solve(numbers, target)
    if solution is None:
        return
    evaluated = evaluate(solution.expression)
    assert evaluated is not None
    value, used = evaluated
    assert value == target and sorted(used) == sorted(numbers)
    step, _, result = solution.first_step.partition("=")
    first = evaluate(step)
    assert first is not None
    assert str(first[0]) == result


@pytest.mark.parametrize(
    ("numbers", "target", "solvable"),
    [
        ([8, 8, 3, 3], 24, True),  # 8/(3-8/3): only through a fraction
        ([1, 5, 5, 5], 24, True),  # 5*(5-1/5)
        ([1, 1, 1, 1], 24, False),
        ([3, 50], -47, True),
        ([7], 7, True),
        ([7], 8, False),
    ],
)
def test_what_can_be_solved(numbers: list[int], target: int, solvable: bool) -> None:
    assert (solve(numbers, target) is not None) == solvable


def test_solution_does_not_depend_on_the_order_of_the_numbers() -> None:
    assert solve([4, 27, 19], 50) == solve([27, 19, 4], 50)


@pytest.mark.parametrize("split", ["train", "test"])
def test_stream_is_seeded_distinct_solvable_and_of_its_split(split: Split) -> None:
    def make(seed: int) -> list[Problem]:
        stream = generate_problems(seed, split, num_numbers=(3, 4), max_number=20, max_target=50)
        return list(islice(stream, 60))

    problems = make(3)
    assert problems == make(3)
    assert problems != make(4)
    assert len({problem.key for problem in problems}) == 60
    assert {len(problem.numbers) for problem in problems} == {3, 4}
    for problem in problems:
        assert (problem.fold == 0) == (split == "test")
        assert all(1 <= number <= 20 for number in problem.numbers)
        assert 1 <= problem.target <= 50
        assert solve(problem.numbers, problem.target) is not None


def test_stream_ends_where_there_are_no_more_problems() -> None:
    every = [
        problem.key
        for split in ("train", "test")
        for problem in generate_problems(0, split, num_numbers=(2,), max_number=3, max_target=9)
    ]
    assert len(every) == len(set(every)) == 16  # 2 + 3 + 3 + 2 + 3 + 3, for 1,1 1,2 1,3 2,2 2,3 3,3
