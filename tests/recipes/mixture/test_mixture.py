"""The recipe that shows how problems are chosen: its parts, its command line, a short run."""

from pathlib import Path

import pytest

from benchmarks.mixture import VARIANTS
from es_cookbook.common.cli import run_cli
from es_cookbook.common.configs import config_from_json, config_to_json
from es_cookbook.recipes.mixture.dataset import CountdownMixture
from es_cookbook.recipes.mixture.train_cli import CLIConfig, main
from es_cookbook.runs.tracking.jsonl import read_metrics


def parsed(*options: str) -> CLIConfig:
    seen: list[CLIConfig] = []
    run_cli(seen.append, CLIConfig, options)
    return seen[0]


def test_the_config_round_trips_through_json() -> None:
    config = parsed(
        "dataset.replay=None", "dataset.curriculum.favour=hard", "dataset.problems_per_generation=8"
    )
    assert config_from_json(config_to_json(config)) == config
    assert isinstance(config.dataset, CountdownMixture)
    assert config.dataset.replay is None
    assert [part.tag for part in config.dataset.members] == ["easy", "main", "hard"]


def test_easy_problems_fade_out() -> None:
    easy, main_, hard = CountdownMixture().members
    assert [easy.schedule(t, 40) for t in (0, 5, 20, 39)] == [0.5, 0.375, 0.0, 0.0]
    assert [main_.schedule(t, 40) for t in (0, 5, 20, 39)] == [0.5, 0.625, 1.0, 1.0]
    assert hard.schedule(39, 40) == 1.0


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_of_the_ablation_is_a_config(variant: str) -> None:
    config = parsed(*VARIANTS[variant].split())
    assert (config.num_pairs == 0) == (variant != "batch_per_pair")


def test_a_run_of_two_generations(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = [f"dataset.{part}.num_train=40" for part in ("easy", "main", "hard")]
    small += [f"dataset.{part}.num_test=2" for part in ("easy", "main", "hard")]
    options = (
        *("num_generations=2", "optimizer.population_size=4", "sampling.max_tokens=8"),
        *(
            "dataset.problems_per_generation=4",
            "dataset.replay.warmup=1",
            "trackers=JsonlTrackerBuilder",
        ),
        *(f"log_path={tmp_path / 'run'}", *small),
    )
    run_cli(main, CLIConfig, options)
    assert capsys.readouterr().out.startswith("test/env/all/correct ")
    first, second, last = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert {"data/share/easy", "data/share/main", "data/share/hard"} <= first.keys()
    assert second["data/left_out"] + second["data/replayed"] > 0
    assert {"test/env/easy/correct", "test/env/main/correct"} <= last.keys()
