"""Ctrl-C ends a command within seconds while a thread is in a call that nothing interrupts."""

import os
import signal
import time
from pathlib import Path

import pytest

from tests.programs import ROOT, Programs
from tests.tiny_run import write_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("signals")]

SAMPLES = "es_cookbook.engines.torch.slots:choose_tokens"
NOT_BEGUN = "interrupted before the run began; nothing has changed: run the same command again"
BEGUN = "interrupted before the first generation ended; to go on: es-cookbook resume log_path={run}"
GIVEN = ("size=none", "optimizer.sigma=0.1", "optimizer.learning_rate=0.1")


@pytest.mark.parametrize(("options", "says"), [((), NOT_BEGUN), (GIVEN, BEGUN)])
def test_ctrl_c_waits_for_no_thread(
    options: tuple[str, ...], says: str, programs: Programs, tmp_path: Path
) -> None:
    errors, run = tmp_path / "errors.txt", tmp_path / "run"
    rows, held_out = tmp_path / "rows.jsonl", tmp_path / "held_out.jsonl"
    rows.write_text('{"question": "1 + 1 =", "answer": "2"}\n' * 20)
    held_out.write_text('{"question": "1 + 2 =", "answer": "3"}\n')
    model = write_tiny_model(tmp_path / "model")
    pid = programs.start(
        [
            *(ROOT / "tests/long_calls.py", SAMPLES, "train", f"data={rows}", "prompt={question}"),
            *(
                "reward=exact",
                "batch=4",
                f"test_data={held_out}",
                f"log_path={run}",
                f"model_name={model}",
                *options,
            ),
        ],
        [os.devnull, tmp_path / "output.txt", errors],
        environment={"ES_COOKBOOK_CACHE": str(tmp_path / "cache")},
    )
    began = time.monotonic()
    while "it takes long" not in (errors.read_text() if errors.exists() else ""):
        assert time.monotonic() - began < 60, errors.read_text()
        time.sleep(0.02)
    time.sleep(0.2)
    os.kill(pid, signal.SIGINT)
    began = time.monotonic()
    assert programs.exit_code() == 130
    # The call takes a minute; `benchmarks.moments` has the limit of 2 s.
    assert time.monotonic() - began < 20
    assert errors.read_text().splitlines()[-1] == says.format(run=run)
    assert run.exists() == (says == BEGUN)
    assert not list(run.rglob("*.partial")) and not (run / "lock").exists()
