"""Folds of generated problems, and streams of distinct ones."""

import random
from itertools import islice

import pytest

from es_cookbook.recipes.generated import distinct, fold_of


def test_a_tenth_of_the_problems_is_in_each_held_out_fold() -> None:
    folds = [fold_of("a recipe", number) for number in range(5000)]
    assert folds.count("test") == pytest.approx(500, abs=80)
    assert folds.count("development") == pytest.approx(500, abs=80)
    assert folds == [fold_of("a recipe", number) for number in range(5000)]
    assert folds != [fold_of("another", number) for number in range(5000)]


def test_a_stream_is_distinct_of_its_fold_and_ends() -> None:
    rng = random.Random(0)

    def is_odd(number: int) -> bool:
        return number % 2 == 1

    assert sorted(distinct(lambda: rng.randrange(10), is_odd)) == [1, 3, 5, 7, 9]
    endless = distinct(lambda: rng.randrange(10**9), is_odd)
    assert all(number % 2 for number in islice(endless, 20))
