"""Schedules are factors: 1 at the beginning, `final` just after the end, never wild in between."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from es_cookbook.common.errors import ConfigError
from es_cookbook.evolution.schedules import (
    Constant,
    Cosine,
    Exponential,
    Linear,
    Schedule,
    Table,
    WarmUp,
)

FALLING = [Linear(final=0.25), Cosine(final=0.25), Exponential(final=0.25)]


@pytest.mark.parametrize(
    ("schedule", "at_0_25_50_75_100"),
    [
        (Constant(), [1, 1, 1, 1, 1]),
        (Linear(final=0.2), [1, 0.8, 0.6, 0.4, 0.2]),
        (Cosine(final=0.0), [1, 0.853553, 0.5, 0.146447, 0]),
        (Exponential(final=0.0001), [1, 0.1, 0.01, 0.001, 0.0001]),
        (Table(generations=(0, 50, 100), factors=(1, 0.5, 2)), [1, 0.75, 0.5, 1.25, 2]),
        (WarmUp(over=51), [1 / 51, 26 / 51, 1, 1, 1]),
        (WarmUp(over=51, then=Linear(final=0.2)), [1 / 51, 0.8 * 26 / 51, 0.6, 0.4, 0.2]),
    ],
)
def test_literal_values(schedule: Schedule, at_0_25_50_75_100: list[float]) -> None:
    values = [schedule(generation, 100) for generation in (0, 25, 50, 75, 100)]
    assert values == pytest.approx(at_0_25_50_75_100, abs=1e-6)


@given(st.sampled_from(FALLING), st.integers(1, 500), st.data())
def test_falling_schedules_fall_from_1_and_stay_above_final_within_the_run(
    schedule: Schedule, num_generations: int, data: st.DataObject
) -> None:
    generation = data.draw(st.integers(0, num_generations - 1))
    now, later = schedule(generation, num_generations), schedule(generation + 1, num_generations)
    assert schedule(0, num_generations) == 1
    assert 1 >= now > later >= 0.25 - 1e-12


@pytest.mark.parametrize("schedule", FALLING)
def test_beyond_the_end_the_final_value_is_held(schedule: Schedule) -> None:
    assert schedule(150, 100) == pytest.approx(0.25)
    assert schedule(0, 0) == 1


def test_schedules_that_cannot_work_are_refused() -> None:
    with pytest.raises(ConfigError, match="final must be 0 or more, found -1"):
        Linear(final=-1)
    with pytest.raises(ConfigError, match="over must be at least 1, found 0"):
        WarmUp(over=0)
    with pytest.raises(ConfigError, match="final must be 0 or more, found nan"):
        Cosine(final=float("nan"))
    with pytest.raises(ConfigError, match="final must be above 0, found 0"):
        Exponential(final=0)
    with pytest.raises(ConfigError, match=r"as many as its factors.* 2 .* 1 factor$"):
        Table(generations=(0, 1), factors=(1,))
    with pytest.raises(ConfigError, match=r"must rise, found \[0, 0\]"):
        Table(generations=(0, 0), factors=(1, 1))
    with pytest.raises(ConfigError, match=r"begin at 0, .* found \[10, 20\]"):
        Table(generations=(10, 20), factors=(1, 0.5))
    with pytest.raises(ConfigError, match="factors must be 0 or more"):
        Table(generations=(0,), factors=(-1,))
