"""The sweep's command line: which runs it makes, and what it refuses."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from es_cookbook import ES, Config
from es_cookbook.common.cli import run_with_fields
from es_cookbook.plugins.sweep.command import Sweep, maker, searched
from es_cookbook.plugins.sweep.search import Range, Values, grid
from es_cookbook.recipes.countdown.train_cli import CLIConfig
from tests.said import refused, typed


def configs(*options: str) -> list[Config]:
    """Those of a grid's trials."""
    made: list[Config] = []

    def keep(config: Sweep, fields: Mapping[str, str]) -> None:
        make, space = maker(config, fields)
        made.extend(make(trial.options) for trial in grid(space))

    run_with_fields(keep, Sweep, "", options)
    return made


def test_listed_options_vary_and_others_apply_to_every_run() -> None:
    made = configs(
        "values.optimizer.sigma=0.5,0.25",
        "values.optimizer=es,momentum",
        "optimizer.population_size=8",
        "num_generations=3",
    )
    default = CLIConfig().optimizer
    assert isinstance(default, ES)
    optimizers = [config.optimizer for config in made]
    assert [(type(o).__name__, getattr(o, "sigma", 0)) for o in optimizers] == [
        *(("ES", 0.5), ("Momentum", 0.5), ("ES", 0.25), ("Momentum", 0.25))
    ]
    assert {o.population_size for o in optimizers} == {8}
    assert {config.num_generations for config in made} == {3}


def test_lists_and_ranges_are_parsed() -> None:
    space, others = searched(
        {
            "values.objective.weights": "1,0.2;1,0.5",
            "values.sampling.temperature": "0.5,1",
            "values.optimizer.learning_rate": "1e-3,2e-3",
            "range.optimizer.sigma": "0.001:1e-1:log",
            "range.attempts": "1:4",
            "optimizer": "es",
        }
    )
    assert space == {
        "objective.weights": Values(("1,0.2", "1,0.5")),
        "sampling.temperature": Values((0.5, 1)),
        "optimizer.learning_rate": Values((0.001, 0.002)),
        "optimizer.sigma": Range(0.001, 0.1, log=True),
        "attempts": Range(1, 4),
    }
    assert isinstance(space["attempts"], Range) and space["attempts"].is_whole
    assert others == {"optimizer": "es"}


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["worker=2"], "unknown option 'worker'"),
        (["values.optimizer.sigmo=1,2"], "did you mean 'optimizer.sigma'?"),
        (["values.optimizer.sigma=0.1,0"], "optimizer.sigma must be"),
        (["values.optimizer.sigma=,"], "sigma=,: it must be one or more different"),
        (["values.seed=1,2"], "seed cannot be given: seeds=... says which"),
        (["values.attempts=1,2", "range.attempts=1:2"], "attempts is given more than once"),
        (["range.attempts=1:2"], "attempts is given as a range, and a grid tries all values"),
        (["range.attempts=2", "sampler=random"], "must be LOW:HIGH or LOW:HIGH:log"),
        (["range.attempts=1:b", "sampler=random"], "must be of numbers, found 'b'"),
        (["range.optimizer.sigma=0:1:log", "sampler=random"], "must be above 0"),
        (["range.optimizer.sigma=-1:-0.5", "sampler=random"], "optimizer.sigma must be"),
        (["range.optimizer.sigma=-1:1", "sampler=optuna"], "optimizer.sigma must be"),
        (["sampler=optuna"], "needs options to choose"),
        (["sampler=gird"], "did you mean 'grid'?"),
    ],
)
def test_a_mistake_is_one_sentence_before_anything_runs(
    tmp_path: Path, options: list[str], sentence: str
) -> None:
    assert sentence in refused("sweep", f"log_path={tmp_path / 'all'}", *options)
    assert not list(tmp_path.glob("all/*/history.jsonl"))


@pytest.mark.usefixtures("quick_python")
@pytest.mark.slow
def test_it_trains_the_recipe(tmp_path: Path) -> None:
    done = typed(
        "sweep",
        *("values.optimizer.sigma=0.01", "num_generations=1", "optimizer.population_size=2"),
        *("dataset.num_train=8", "dataset.num_test=4", "dataset.problems_per_generation=2"),
        f"log_path={tmp_path}",
    )
    assert "| 0.01 |" in done.stdout
    assert (tmp_path / "sigma0.01-seed0" / "history.jsonl").exists()
