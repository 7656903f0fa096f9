"""What other libraries have of a run, read as they read it, and that none of them ends it."""

import contextlib
import json
import logging
import os
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from es_cookbook.common.errors import ConfigError
from es_cookbook.plugins.trackers.libraries import (
    TensorboardTrackerBuilder,
    TrackioTrackerBuilder,
    WandbTrackerBuilder,
)
from es_cookbook.rl.types import Action, Observation, Trajectory, TrajectoryGroup, Transition
from es_cookbook.runs.tracking.base import RunInfo
from es_cookbook.runs.tracking.trackers import TrackersBuilder

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def logged_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "true")  # So that what a tracker sets is undone.


def records(path: Path) -> Iterator[bytes]:
    """The payloads of a .wandb file: LevelDB's log format, blocks of 32 KiB, after a header."""
    data = path.read_bytes()
    position, parts = 7, b""
    while position + 7 <= len(data):
        if 32768 - position % 32768 < 7:
            position += 32768 - position % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        parts += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # A whole record, or the last part of one.
            yield parts
            parts = b""


@contextlib.contextmanager
def some_server() -> Iterator[str]:
    """A server that answers everything with an error, at this address."""
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def logged(path: Path) -> list[dict[str, str]]:
    from wandb.proto import wandb_internal_pb2

    rows: list[dict[str, str]] = []
    for payload in records(path):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(payload)
        if record.HasField("history"):
            items = record.history.item
            rows.append({item.key or "/".join(item.nested_key): item.value_json for item in items})
    return rows


def wait_for_rows(path: Path, count: int) -> list[dict[str, str]]:
    """The metrics of so many generations; W&B's service may write after `finish`."""
    until = time.monotonic() + 30
    while True:
        rows = [row for row in logged(path) if "reward/mean" in row]
        if len(rows) >= count or time.monotonic() > until:
            return rows
        time.sleep(0.1)


def test_offline_runs_lie_in_the_run_directory_and_resume_under_the_same_id(tmp_path: Path) -> None:
    path = tmp_path / "my run"
    path.mkdir()
    for first, values in ((0, (0.25, 0.5)), (2, (0.75,))):
        info = RunInfo(path, '{"sigma": 0.005}', 0, 3, start_generation=first)
        tracker = WandbTrackerBuilder(wandb_project="mine")(info)
        for i, value in enumerate(values):
            tracker.log(first + i, {"reward/mean": value})
        tracker.close()
        tracker.close()
    files = sorted(path.glob("wandb/offline-run-*/*.wandb"))
    assert len(files) == 2, "a project alone does not go online: nobody is logged in"
    assert {file.name for file in files} == {f"run-{(path / 'wandb_id').read_text()}.wandb"}
    rows = [
        row for file, count in zip(files, (2, 1), strict=True) for row in wait_for_rows(file, count)
    ]
    assert sorted((row["_step"], row["reward/mean"]) for row in rows) == [
        ("0", "0.25"),
        ("1", "0.5"),
        ("2", "0.75"),
    ]


HOSTILE = "<script>alert(1)</script> \x1b[31m\u202e" + "x" * 1_000_000


def hostile_group(rewards_G: list[float]) -> TrajectoryGroup:
    action = Action((1,), HOSTILE, "stop")
    trajectories_G_K = [
        [Trajectory((Transition(Observation((2, 3)), action, reward, {}, {}),))]
        for reward in rewards_G
    ]
    return TrajectoryGroup(trajectories_G_K, tags=("<b>tag</b>",))


def test_rollouts_are_a_table_of_a_bounded_number_of_escaped_texts(tmp_path: Path) -> None:
    builder = WandbTrackerBuilder(rollouts_every=2, rollouts_per_table=3)
    tracker = builder(RunInfo(tmp_path, '{"a": {"$class": "m:ES", "sigma": 0.5}}', 0, 3))
    for generation in range(3):
        tracker.log_rollouts(generation, [hostile_group([0.0] * 8)], lambda tokens_T: "<i>?</i>")
        tracker.log(generation, {"reward/mean": 0.5})
    tracker.close()
    (run,) = tmp_path.glob("wandb/offline-run-*")
    tables = [json.loads(path.read_text()) for path in run.glob("files/media/table/*.json")]
    assert sorted({row[0] for table in tables for row in table["data"]}) == [0, 2]
    for table in tables:
        assert len(table["data"]) == 3
        for row in table["data"]:
            told = dict(zip(table["columns"], row, strict=True))
            assert told["prompt"] == "&lt;i&gt;?&lt;/i&gt;"
            assert told["answer"].startswith(
                "&lt;script&gt;alert(1)&lt;/script&gt; \\x1b[31m\\u202exxx"
            )
            assert told["answer"].endswith(" more characters]") and len(told["answer"]) < 2_200
            assert told["tags"] == "&lt;b&gt;tag&lt;/b&gt;"
    (file,) = run.glob("*.wandb")
    rows = wait_for_rows(file, 3)
    assert [row["progress/generation"] for row in rows] == ["0", "1", "2"]
    assert [any(key.startswith("rollouts") for key in row) for row in rows] == [True, False, True]


def test_a_failure_inside_wandb_is_a_warning_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*args: object, **settings: object) -> None:
        raise RuntimeError("service did not start")

    monkeypatch.setattr("wandb.init", broken)
    with caplog.at_level(logging.WARNING):
        tracker = WandbTrackerBuilder()(RunInfo(tmp_path, "{}", 0, 3))
        tracker.log(0, {"reward/mean": 1.0})
        tracker.close()
    assert caplog.messages == [
        "W&B is off for the rest of this run: RuntimeError: service did not start"
    ]


@pytest.mark.parametrize(
    ("project", "key", "mode", "expected"),
    [
        ("mine", True, None, "online"),
        ("mine", True, "unreachable", "offline"),
        (None, True, None, "offline"),
        ("mine", False, None, "offline"),
        ("mine", True, "offline", "offline"),
        ("mine", True, "disabled", "disabled"),
    ],
)
def test_a_run_is_online_with_a_project_a_login_and_a_server(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    project: str | None,
    key: bool,
    mode: str | None,
    expected: str,
) -> None:
    asked: list[object] = []

    def init(**settings: object) -> object:
        asked.append(settings["mode"])
        return SimpleNamespace(define_metric=lambda *_, **__: None, finish=lambda: None)

    # Going online for real would need an account: login's answer and the start are stood in for.
    monkeypatch.setattr("wandb.login", lambda prompt, verify: key)
    monkeypatch.setattr("wandb.init", init)
    if mode and mode != "unreachable":
        monkeypatch.setenv("WANDB_MODE", mode)
    with some_server() as url:
        base_url = "http://127.0.0.1:9" if mode == "unreachable" else url
        settings = SimpleNamespace(settings=SimpleNamespace(base_url=base_url))
        monkeypatch.setattr("wandb.setup", lambda: settings)
        WandbTrackerBuilder(wandb_project=project)(RunInfo(tmp_path, "{}", 0, 3)).close()
    assert asked == [expected]
    assert ("not logged in to W&B" in caplog.text) == (not key)
    assert ("is not reachable" in caplog.text) == (mode == "unreachable")


@pytest.mark.parametrize("name", ["wandb", "tensorboard", "trackio"])
def test_a_library_that_is_not_installed_is_told_at_the_start(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    builders = {
        "wandb": TrackersBuilder(wandb=WandbTrackerBuilder()),
        "tensorboard": TrackersBuilder(tensorboard=TensorboardTrackerBuilder()),
        "trackio": TrackersBuilder(trackio=TrackioTrackerBuilder(project="mine")),
    }
    with pytest.raises(
        ConfigError, match=rf"trackers\.{name} needs {name}, which is not installed"
    ):
        builders[name].check()
    TrackersBuilder().check()


CONFIG = '{"optimizer": {"$class": "some.module:ES", "sigma": 0.5}}'


def test_scalars_come_back_and_a_resumed_run_goes_on(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    builder = TensorboardTrackerBuilder()
    # The first process was ended before generation 1 counted; the second does it again.
    for start, values in ((0, (0.25, 0.5)), (1, (0.75, float("nan"), 1.0))):
        tracker = builder(RunInfo(tmp_path, CONFIG, 0, 4, start_generation=start))
        for generation, value in enumerate(values, start):
            tracker.log(generation, {"reward/mean": value, "progress/tokens": 7})
        tracker.close()
        tracker.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"), {"scalars": 0})
    events.Reload()
    read = [(event.step, event.value) for event in events.Scalars("reward/mean")]
    assert read == [(0, 0.25), (1, 0.75), (3, 1.0)]


PROGRAM = """
import json, pathlib, sys
from es_cookbook.runs.tracking.base import RunInfo
from es_cookbook.plugins.trackers.libraries import TrackioTrackerBuilder

config = '{"optimizer": {"$class": "some.module:ES", "sigma": 0.5}}'
for name, rewinds, start, values in json.loads(sys.argv[2]):
    run = pathlib.Path(sys.argv[1], name)
    (run / "rewound" / str(rewinds)).mkdir(parents=True, exist_ok=True)
    tracker = TrackioTrackerBuilder(project="mine")(RunInfo(run, config, 0, 4, start))
    for generation, value in enumerate(values, start):
        tracker.log(generation, {"reward/mean": float("nan") if value is None else value})
    tracker.close()
    tracker.close()

from trackio import SQLiteStorage

for run in SQLiteStorage.get_run_records("mine"):
    logs = SQLiteStorage.get_logs("mine", run["name"], run_id=run["id"])
    print(json.dumps([run["name"], [[row["step"], row.get("reward/mean")] for row in logs]]))
"""


@pytest.mark.parametrize(
    ("sessions", "runs"),
    [
        (
            [["run", 0, 0, [0.25, 0.5]], ["run", 0, 2, [0.75, None]]],
            [["run", [[0, 0.25], [1, 0.5], [2, 0.75], [3, None]]]],
        ),
        (
            [["run", 0, 0, [0.5]], ["run", 1, 1, [0.5]], ["run", 1, 2, [0.25]]],
            [["run", [[0, 0.5]]], ["run-rewound-1", [[1, 0.5], [2, 0.25]]]],
        ),
        (
            [["a/run", 0, 0, [0.5]], ["b/run", 0, 0, [0.25]], ["b/run", 0, 1, [0.5]]],
            [["run", [[0, 0.25], [1, 0.5]]], ["run", [[0, 0.5]]]],
        ),
    ],
    ids=["resumed", "rewound", "of the same name"],
)
def test_a_resumed_run_is_one_run_in_trackio_and_others_are_separate(
    tmp_path: Path, sessions: list[Any], runs: list[Any]
) -> None:
    pytest.importorskip("trackio")  # In its own process: it reads TRACKIO_DIR when imported.
    own = {"TRACKIO_DIR": str(tmp_path / "trackio"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, tmp_path, json.dumps(sessions)],
        env=os.environ | own,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(map(json.loads, done.stdout.splitlines())) == runs


def test_a_rewound_run_goes_on_as_another_in_wandb(tmp_path: Path) -> None:
    files: set[Path] = set()
    for rewinds, first in ((0, 0), (0, 2), (1, 1)):
        if rewinds:  # As `rewind` leaves it.
            (tmp_path / "rewound/1").mkdir(parents=True)
            (tmp_path / "wandb_id").rename(tmp_path / "rewound/1/wandb_id")
        tracker = WandbTrackerBuilder(wandb_project="mine")(RunInfo(tmp_path, "{}", 0, 3, first))
        tracker.log(first, {"reward/mean": 0.5})
        tracker.close()
        (new,) = {*tmp_path.glob("wandb/offline-run-*/*.wandb")} - files
        files.add(new)
        assert [row["_step"] for row in wait_for_rows(new, 1)] == [str(first)]
    old, now = (tmp_path / name for name in ("rewound/1/wandb_id", "wandb_id"))
    assert old.read_text() != now.read_text()
    names = sorted(file.name for file in files)
    assert names == sorted(f"run-{path.read_text()}.wandb" for path in (old, old, now))
