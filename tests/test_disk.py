"""A file that cannot grow: the run stops with one sentence, and goes on exactly."""

import re
from pathlib import Path

import chz
import pytest

from es_cookbook.common.errors import RunDirectoryError
from es_cookbook.evolution.optimizers.es import ES
from es_cookbook.runs.program import run as run_config
from es_cookbook.runs.tracking.jsonl import JsonlTrackerBuilder
from tests.limits import largest_file
from tests.plugins.branches.test_fork import config, files, same_run
from tests.tiny_run import TinyConfig

CASES = {"config.json": 700, "rollouts.jsonl": 2_500, "history.jsonl": 6_000}
"""The file that hits a limit first -> bytes."""


def limited_config(log_path: Path, file_name: str) -> TinyConfig:
    """Return a run in which this file grows fastest."""
    made = config(log_path, num_generations=10, behavior_if_log_dir_exists="resume")
    if file_name == "rollouts.jsonl":
        return chz.replace(made, trackers=JsonlTrackerBuilder(rollouts_per_generation=8))
    if file_name != "history.jsonl":
        return made
    return chz.replace(
        made,
        optimizer=ES(population_size=32, sigma=0.1, learning_rate=0.05),
        trackers=JsonlTrackerBuilder(rollouts_per_generation=0),
    )


@pytest.mark.slow
def test_a_limit_on_file_sizes_stops_a_run_wherever_it_hits_and_it_goes_on_without(
    tmp_path: Path,
) -> None:
    for file_name, limit in CASES.items():
        run = tmp_path / file_name
        with largest_file(limit), pytest.raises(RunDirectoryError) as caught:
            run_config(limited_config(run, file_name))
        assert re.fullmatch(
            rf"cannot (write|append to) {run}/{file_name}: File too large; raise the limit on a "
            r"file's size \(ulimit -f\) by at least \d+ bytes(; everything before it is safe)?",
            str(caught.value),
        )
        history = files(run).get("history.jsonl", b"") if run.exists() else b""
        assert len(history) <= limit and history.count(b"\n") == len(history.splitlines())
        whole = chz.replace(limited_config(run, file_name), log_path=str(tmp_path / "whole"))
        run_config(chz.replace(whole, behavior_if_log_dir_exists="delete"))
        run_config(limited_config(run, file_name))
        same_run(run, tmp_path / "whole")
        assert (run / "history.jsonl").read_bytes().startswith(history)
