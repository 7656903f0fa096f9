"""The comparison's command line: which runs it makes, what it refuses, and what it leaves."""

from pathlib import Path

import numpy as np
import pytest

from es_cookbook import ES, Config
from es_cookbook.common.cli import run_with_fields
from es_cookbook.evolution.optimizers.base import OPTIMIZER_NAMES
from es_cookbook.plugins.report.commands import compare
from es_cookbook.plugins.report.commands.compare import Compare
from es_cookbook.recipes.countdown.train_cli import CLIConfig
from es_cookbook.runs.tracking.jsonl import CORRECT
from es_cookbook.runs.tracking.reading import read_run
from tests.distributions import Register
from tests.said import SMALL_COUNTDOWN, refused, typed

TINY = (*SMALL_COUNTDOWN, "seeds=0,1")


@pytest.fixture(autouse=True)
def twin(register: Register) -> None:
    """A second optimizer, whatever others there are."""
    register({"optimizers": {"twin": OPTIMIZER_NAMES["es"]}})


def runs_of(*options: str) -> dict[str, list[Config]]:
    made: dict[str, list[Config]] = {}
    run_with_fields(lambda *given: made.update(compare.runs(*given)), Compare, "", options)
    return made


def test_every_optimizer_has_its_recommended_settings_and_every_run_its_directory() -> None:
    runs = runs_of("optimizers=es", "seeds=0,2", "log_path=there")
    assert [config.optimizer for config in runs["es"]] == [CLIConfig().optimizer] * 2
    assert [(c.seed, c.log_path) for c in runs["es"]] == [
        (0, str(Path("there/es-seed0"))),
        (2, str(Path("there/es-seed2"))),
    ]
    assert runs["es"][0].num_generations == CLIConfig().num_generations


def test_an_option_is_for_all_runs_or_with_a_name_before_it_for_one_optimizers() -> None:
    runs = runs_of(
        "optimizers=es,twin",
        "seeds=0",
        "optimizer.sigma=0.5",
        "num_generations=6",
        "optimizer.population_size=8",
        "twin.optimizer.learning_rate=0.25",
        "twin.optimizer.population_size=4",
        "twin.num_generations=12",
    )
    es, twin = runs["es"][0], runs["twin"][0]
    assert isinstance(es.optimizer, ES) and isinstance(twin.optimizer, ES)
    assert es.optimizer.sigma == twin.optimizer.sigma == 0.5
    assert (es.optimizer.learning_rate, twin.optimizer.learning_rate) == (0.02, 0.25)
    assert (es.num_generations, twin.num_generations) == (6, 12)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["optimizers=twn"], "unknown optimizer 'twn': did you mean 'twin'?"),
        (["optimizers=es,es"], "optimizers must be different ones, found ('es', 'es')"),
        (["optimizers=es", "seeds=1,1"], "seeds must be different ones, found (1, 1)"),
        (["optimizers=es,twin", "twin.num_generations=7"], "twin makes 14336, es 102400"),
        (["optimizers=es", "twin.num_generations=7"], "an optimizer that is not compared"),
        (["optimizers=es", "es.optimizer.sigmo=7"], "did you mean 'optimizer.sigma'?"),
        (["optimizers=es", "metric=correct"], "metric must be a held-out one, test/..., found"),
        (["optimizers=es", "seed=7"], "seed cannot be given: seeds=... says which"),
        (["optimizers=es", "optimizer=twin"], "optimizers=... says which"),
    ],
)
def test_a_mistake_is_one_sentence_before_anything_runs(
    tmp_path: Path, options: list[str], sentence: str
) -> None:
    assert sentence in refused("compare", *options, f"log_path={tmp_path / 'all'}")
    assert not (tmp_path / "all").exists()


@pytest.mark.slow
def test_it_runs_prints_and_draws_and_does_nothing_twice(tmp_path: Path) -> None:
    first = typed("compare", *TINY, "optimizers=es", f"log_path={tmp_path}").stdout
    histories = sorted(tmp_path.glob("*/history.jsonl"))
    assert [path.parent.name for path in histories] == ["es-seed0", "es-seed1"]
    written = [path.stat().st_mtime_ns for path in histories]
    table = (tmp_path / "comparison.md").read_text()
    assert table in first
    paths = [path.parent for path in histories]
    final = np.array([100 * read_run(path).metrics[-1][CORRECT] for path in paths])
    assert f"| es | 2 | {final.mean():.1f} % ({final.min():.1f} … {final.max():.1f}) |" in table
    assert "| 16 |" in table, "2 generations x 4 genomes x 2 problems"
    assert "held-out correct (%)" in (tmp_path / "comparison.svg").read_text()
    assert (tmp_path / "comparison.png").exists()

    again = typed("compare", *TINY, "optimizers=es,twin", f"log_path={tmp_path}").stdout
    assert again.count("which is complete") == 2
    assert [path.stat().st_mtime_ns for path in histories] == written
    lines = (tmp_path / "comparison.md").read_text().splitlines()
    assert [line.split()[1] for line in lines[2:]] == ["es", "twin"]
    es, twin = (line.split("|")[2:5] for line in lines[2:])  # Without the time.
    assert es == twin, "the same optimizer under two names"
