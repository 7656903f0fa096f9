"""`run_all`, and checks that runs are complete and comparable."""

from pathlib import Path
from typing import Any

import chz
import pytest

from es_cookbook import ES, Config, run
from es_cookbook.common.errors import ConfigError, RunDirectoryError
from es_cookbook.plugins.sweep.in_turn import is_complete, refuse_unequal_rollouts, run_all
from es_cookbook.recipes.countdown.dataset import CountdownDatasetBuilder
from es_cookbook.recipes.countdown.train_cli import CLIConfig
from tests.fakes import FakeEngineBuilder
from tests.tiny_run import TinyConfig, tiny, untimed

FILES = ("history.jsonl", "metrics.jsonl", "rollouts.jsonl")


def short(log_path: Path, **fields: Any) -> TinyConfig:
    return tiny(log_path, **{"num_generations": 6} | fields)


def engines_made_by(configs: list[Config]) -> int:
    before = len(FakeEngineBuilder.made)
    run_all(configs)
    return len(FakeEngineBuilder.made) - before


def test_complete_runs_are_skipped_and_others_continue(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    unbroken = short(tmp_path / "unbroken", seed=1)
    complete, half_done, _ = configs = [
        short(tmp_path / str(seed), seed=seed) for seed in (0, 1, 2)
    ]
    run(unbroken)
    run(complete)
    run(chz.replace(half_done, num_generations=3))
    assert [is_complete(config) for config in configs] == [True, False, False]
    written = [(tmp_path / "0" / name).stat().st_mtime_ns for name in FILES]
    assert engines_made_by(configs) == 2
    assert [(tmp_path / "0" / name).stat().st_mtime_ns for name in FILES] == written
    for name in FILES[1:]:
        assert untimed(tmp_path / "1" / name)[-1] == untimed(tmp_path / "unbroken" / name)[-1]
    assert (tmp_path / "1" / FILES[0]).read_bytes() == (
        tmp_path / "unbroken" / FILES[0]
    ).read_bytes()
    assert f"run 1 of 3: {tmp_path / '0'}, which is complete\n" in capsys.readouterr().out
    assert all(is_complete(config) for config in configs)
    assert engines_made_by(configs) == 0


def test_a_run_without_its_last_measurement_is_not_complete(tmp_path: Path) -> None:
    config = short(tmp_path / "run")
    run(config)
    metrics = tmp_path / "run" / "metrics.jsonl"
    whole = metrics.read_bytes()
    metrics.write_bytes(b"".join(whole.splitlines(keepends=True)[:-1]))
    assert not is_complete(config)
    run_all([config])
    assert len(metrics.read_bytes().splitlines()) == len(whole.splitlines())


def test_another_run_in_its_directory_is_refused(tmp_path: Path) -> None:
    config = short(tmp_path / "run")
    run(config)
    other = chz.replace(config, optimizer=ES(population_size=4, sigma=0.2, learning_rate=0.05))
    assert not is_complete(other)
    with pytest.raises(RunDirectoryError, match=r"optimizer\.sigma was 0\.1, is 0\.2"):
        run_all([other])
    assert is_complete(chz.replace(config, snapshot_every=7)), "how it is kept does not count"
    sized = {"size": ("num_generations",), "num_generations": 100, "minutes": 5.0}
    assert is_complete(chz.replace(config, **sized)), "its length was chosen"


def test_runs_that_would_share_a_directory_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"its own log_path, found .*run more than once"):
        run_all([short(tmp_path / "run"), short(tmp_path / "run", seed=1)])
    assert not (tmp_path / "run").exists()


def test_compared_runs_must_make_the_same_number_of_rollouts() -> None:
    few = CLIConfig(
        optimizer=ES(population_size=4), dataset=CountdownDatasetBuilder(problems_per_generation=8)
    )
    many = chz.replace(
        few,
        optimizer=ES(population_size=16),
        dataset=CountdownDatasetBuilder(problems_per_generation=2),
    )
    twice = chz.replace(few, num_generations=few.num_generations // 2, attempts=2)
    refuse_unequal_rollouts({"few": [few], "many": [many], "tried twice": [twice]})
    unequal = chz.replace(many, optimizer=few.optimizer)
    with pytest.raises(ConfigError, match="unequal makes 400, few 1600"):
        refuse_unequal_rollouts({"few": [few], "unequal": [unequal]})
    others = chz.replace(
        many, dataset=CountdownDatasetBuilder(problems_per_generation=2, max_number=9)
    )
    with pytest.raises(ConfigError, match="others and few must have the same dataset"):
        refuse_unequal_rollouts({"few": [few], "others": [others]})
    config = short(Path("a"))
    fewer = chz.replace(config, num_generations=5)
    with pytest.raises(ConfigError, match="short makes 20 per problem of a batch, es 24: change"):
        refuse_unequal_rollouts({"es": [config], "short": [fewer]})
