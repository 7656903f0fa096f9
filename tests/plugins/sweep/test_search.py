"""Which trials a sweep makes, and what their directories are called."""

import math
from pathlib import Path

import pytest

from es_cookbook.common.errors import ConfigError
from es_cookbook.plugins.sweep.search import Range, Study, Trial, Values, draws, ends, grid


def test_a_grid_is_every_combination_and_the_last_option_changes_fastest() -> None:
    trials = grid({"a": Values((1, 2)), "b": Values(("x", "y"))})
    assert [(trial.number, dict(trial.options)) for trial in trials] == [
        (0, {"a": 1, "b": "x"}),
        (1, {"a": 1, "b": "y"}),
        (2, {"a": 2, "b": "x"}),
        (3, {"a": 2, "b": "y"}),
    ]
    assert [dict(trial.options) for trial in grid({})] == [{}], "the seeds alone"


def test_random_trials_are_a_function_of_the_seed_and_more_begin_with_the_same() -> None:
    space = {"sigma": Range(0.001, 0.1, log=True), "n": Range(2, 4), "kind": Values(("a", "b"))}
    trials = draws(space, 60, seed=0)
    assert draws(space, 20, seed=0) == trials[:20] != draws(space, 20, seed=1)
    assert [trial.number for trial in trials] == list(range(60))
    sigmas = [float(trial.options["sigma"]) for trial in trials]
    assert all(0.001 <= sigma <= 0.1 for sigma in sigmas)
    assert 20 < sum(sigma < 0.01 for sigma in sigmas) < 40, "log-uniform"
    assert {trial.options["n"] for trial in trials} == {2, 3, 4}
    assert {trial.options["kind"] for trial in trials} == {"a", "b"}
    few = draws({"n": Range(1, 3)}, 50, seed=0)
    assert sorted(trial.options["n"] for trial in few) == [1, 2, 3], "none is made twice"


def test_optuna_goes_on_with_recorded_trials_and_learns_from_their_values(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    space = {"sigma": Range(0.001, 0.1, log=True), "n": Range(2, 4), "kind": Values(("a", "b"))}

    def tried(count: int) -> list[Trial]:
        study, found = Study(space, 0, "reward", tmp_path), []
        for _, trial in zip(range(count), study.trials(), strict=False):
            found.append(trial)
            failed = len(found) == 1
            sigma = float(trial.options["sigma"])
            study.tell(trial, math.nan if failed else -abs(math.log(sigma / 0.02)))
        return found

    first = tried(15)
    more = tried(40)
    assert more[:15] == first, "also the failed one, which is tried again"
    assert len({trial.name for trial in more}) == 40
    spread = [abs(math.log(float(trial.options["sigma"]) / 0.02)) for trial in more]
    assert sum(spread[30:]) < sum(spread[:10]) / 2, "draws near the best"
    few = Study({"n": Range(1, 3)}, 0, "reward", tmp_path).trials()
    assert sorted(trial.options["n"] for trial in few) == [1, 2, 3], "none is made twice"


def test_checks_see_all_values_and_both_ends() -> None:
    seen = ends({"a": Values((1, 2, 3)), "b": Range(0.5, 0.75)})
    assert [list(trial.options.values()) for trial in seen] == [[1, 0.5], [2, 0.75], [3, 0.5]]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"sigma": 0.123456}, {"sigma": 0.123457}),
        ({"path": "../../x"}, {"path": ".. .. x"}),
        ({"weights": "1,2"}, {"weights": "1 2"}),
        ({"long": "a" * 500}, {"long": "a" * 501}),
    ],
)
def test_shortened_names_stay_unique(one: dict[str, str], other: dict[str, str]) -> None:
    names = [Trial(0, options).name for options in (one, other)]
    assert names[0] != names[1]
    assert all("/" not in name and len(name) < 140 for name in names)


def test_values_that_are_written_alike_are_refused() -> None:
    with pytest.raises(ConfigError, match="written alike"):
        grid({"a": Values((1, "1"))})
