import logging
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from es_cookbook.common.errors import ConfigError
from es_cookbook.runs.tracking.base import RunInfo
from es_cookbook.runs.tracking.standard import StandardTrackersBuilder
from es_cookbook.runs.tracking.wandb_tracker import WandbTrackerBuilder

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


def test_offline_runs_lie_in_the_run_directory_and_resume_under_the_same_id(
    tmp_path: Path,
) -> None:
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
    rows: list[dict[str, str]] = []
    until = time.monotonic() + 30
    while len(rows) < 3 and time.monotonic() < until:  # W&B's service may write after `finish`.
        time.sleep(0.1)
        rows = [row for file in files for row in logged(file) if "reward/mean" in row]
    assert sorted((row["_step"], row["reward/mean"]) for row in rows) == [
        ("0", "0.25"),
        ("1", "0.5"),
        ("2", "0.75"),
    ]


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
        (None, True, None, "offline"),
        ("mine", False, None, "offline"),
        ("mine", True, "offline", "offline"),
        ("mine", True, "disabled", "disabled"),
    ],
)
def test_online_takes_a_project_a_login_and_no_word_against_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    project: str | None,
    key: bool,
    mode: str | None,
    expected: str,
) -> None:
    asked: list[object] = []

    class Run:
        def finish(self) -> None: ...

    def init(**settings: object) -> Run:
        asked.append(settings["mode"])
        return Run()

    # Going online for real would need an account: login's answer and the start are stood in for.
    monkeypatch.setattr("wandb.login", lambda prompt, verify: key)
    monkeypatch.setattr("wandb.init", init)
    if mode:
        monkeypatch.setenv("WANDB_MODE", mode)
    WandbTrackerBuilder(wandb_project=project)(RunInfo(tmp_path, "{}", 0, 3)).close()
    assert asked == [expected]


@pytest.mark.parametrize(
    ("project", "key", "mode", "is_told"),
    [
        ("mine", False, None, True),
        ("mine", True, None, False),
        (None, False, None, False),
        ("mine", False, "offline", False),
    ],
)
def test_a_project_without_a_login_is_told_at_the_start(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    project: str | None,
    key: bool,
    mode: str | None,
    is_told: bool,
) -> None:
    if key:
        monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    if mode:
        monkeypatch.setenv("WANDB_MODE", mode)
    StandardTrackersBuilder(wandb=WandbTrackerBuilder(wandb_project=project)).check()
    told = [message for message in caplog.messages if "nobody is logged in to W&B" in message]
    assert len(told) == is_told


def test_wandb_that_is_not_installed_is_told_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"trackers\.wandb needs wandb, which is not installed"):
        StandardTrackersBuilder(wandb=WandbTrackerBuilder()).check()
    StandardTrackersBuilder().check()
