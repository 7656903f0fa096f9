"""What Trackio's own database has of a run."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

PROGRAM = """
import json, pathlib, sys
from es_cookbook.runs.tracking.base import RunInfo
from es_cookbook.runs.tracking.trackio_tracker import TrackioTrackerBuilder

config = '{"optimizer": {"$class": "some.module:ES", "sigma": 0.5}}'
for start, values in ((0, (0.25, 0.5)), (2, (0.75, float("nan")))):
    info = RunInfo(pathlib.Path(sys.argv[1]), config, 0, 4, start_generation=start)
    tracker = TrackioTrackerBuilder(project="mine")(info)
    for generation, value in enumerate(values, start):
        tracker.log(generation, {"reward/mean": value, "progress/tokens": 7})
    tracker.close()
    tracker.close()

from trackio import Api, SQLiteStorage

(run,) = Api().runs("mine")
logs = SQLiteStorage.get_logs("mine", run.name)
print(json.dumps([[row["step"], row.get("reward/mean"), row["progress/tokens"]] for row in logs]))
print(json.dumps(SQLiteStorage.get_run_config("mine", run.name)["optimizer"]))
"""


def test_a_resumed_run_is_one_run_in_trackio(tmp_path: Path) -> None:
    pytest.importorskip("trackio")
    run = tmp_path / "my run"
    run.mkdir()
    # In a process of its own: Trackio reads where to write when it is imported.
    own = {"TRACKIO_DIR": str(tmp_path / "trackio"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(run)],
        env=os.environ | own,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    logs, optimizer = map(json.loads, done.stdout.splitlines())
    assert logs == [[0, 0.25, 7], [1, 0.5, 7], [2, 0.75, 7], [3, None, 7]]
    assert optimizer == {"class": "ES", "sigma": 0.5}
