"""Ctrl-C and SIGTERM end a run, whatever an Env does to the event loop."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.blocking import wait_for

ROOT = Path(__file__).parents[2]
BASE = ROOT / "tests/data/base"


def blocked(log_path: Path, where: str, kind: str) -> subprocess.Popen[str]:
    """A run in another process whose event loop is held, for as long as its time-out lets it."""
    run = subprocess.Popen(
        [
            *(sys.executable, "-m", "tests.blocking", f"log_path={log_path}"),
            *(f"model_name={BASE}", "engine=tests.fakes:FakeEngineBuilder"),
            *("trackers=JsonlTrackerBuilder", f"dataset.where={where}", f"dataset.kind={kind}"),
        ],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    wait_for(log_path / "history.jsonl", 2)  # Generation 1 is the one that blocks.
    time.sleep(0.5)
    assert run.poll() is None, run.communicate()[1]
    return run


def ended(run: subprocess.Popen[str], within: float) -> str:
    """What it said at its end."""
    out, err = run.communicate(timeout=within)
    assert run.returncode == 130
    assert out == ""
    return err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(
    ("where", "kind"),
    [
        ("sync", "sleep"),
        ("async", "swallow_exceptions"),
        ("sync", "regular_expression"),
        ("task", "loop"),
        ("sync", "swallow_everything"),
        ("close", "lock"),
    ],
)
@pytest.mark.slow
def test_the_first_signal_ends_cleanly_what_an_env_blocks(
    tmp_path: Path, number: signal.Signals, where: str, kind: str
) -> None:
    run = blocked(tmp_path, where, kind)
    run.send_signal(number)
    said = ended(run, within=5)
    assert said.startswith("interrupted after generation 1; to go on, run the same command with ")
    assert not (tmp_path / "lock").exists()
