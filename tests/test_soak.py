"""Short soaks: a run of many generations and runs one after the other stay flat.

`python -m benchmarks.soak` is the long one: 20,000 generations and 100 runs.
"""

import json
from pathlib import Path

import pytest

from benchmarks import soak
from tests.tiny_run import write_tiny_model

HOW = {"eval_every": 50, "snapshot_every": 40, "sample_every": 20}
FLAT = ("handles", "children", "files")


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    write_tiny_model(tmp_path / "model")
    return tmp_path


@pytest.mark.slow
def test_a_run_holds_no_more_after_many_generations(directory: Path) -> None:
    soak.alone(directory, soak.one_run, directory, "run", 200, HOW)
    lines = (directory / "run.samples.jsonl").read_text().splitlines()
    samples = [soak.Sample(**json.loads(line)) for line in lines]
    assert [sample.at for sample in samples] == list(range(10, 200, 20))
    assert {what: soak.grown(samples, what) for what in FLAT} == dict.fromkeys(FLAT, 0)
    # anyio keeps as many as were ever needed at once; one a snapshot that is kept would be two.
    assert soak.grown(samples, "threads") <= 1
    # One object a generation that is kept would be a hundred.
    assert soak.grown(samples, "objects") < 50
    assert soak.grown(samples, "memory") < 8 * soak.MEGABYTE


@pytest.mark.slow
def test_runs_one_after_the_other_leave_nothing_behind(directory: Path) -> None:
    samples, _ = soak.alone(directory, soak.runs_in_a_row, directory, 4)
    assert [sample.at for sample in samples] == [1, 2, 3, 4]
    assert {what: soak.grown(samples, what) for what in FLAT} == dict.fromkeys(FLAT, 0)
    assert soak.grown(samples, "threads") <= 0
    # An engine that is kept, or its model, is tens of thousands.
    assert soak.grown(samples, "objects") < 1_000
