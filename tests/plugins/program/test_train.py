"""A program trained from the command line: by a real engine, killed, resumed, and refused."""

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from es_cookbook.common.trust import reached
from es_cookbook.plugins.program.dataset import ProgramRows
from es_cookbook.recipes.countdown.train_cli import BUNDLED_MODEL
from tests.programs import Programs, num_recorded
from tests.said import SMALL_ROWS, refused, typed
from tests.sandboxes import needs_sandbox

pytestmark = pytest.mark.xdist_group("programs")

ROOT = Path(__file__).parents[3]
RECIPES = ROOT / "recipes"
ROWS = f"data={RECIPES / 'questions.jsonl'}"
SMALL = (ROWS, f"model_name={BUNDLED_MODEL}", *SMALL_ROWS)


def words_for(program: str, sandbox: str | None = None) -> str:
    """What `trust=` has to name for a program."""
    rows = ProgramRows(source="x", program=program, sandbox=(sandbox,) if sandbox else ())
    return ",".join(each.word for each in reached(rows))


@pytest.mark.skipif(not (shutil.which("jq") and shutil.which("curl")), reason="no jq, no curl")
@pytest.mark.parametrize("enclosed", [False, pytest.param(True, marks=needs_sandbox)])
def test_a_shell_script_of_a_few_lines_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, enclosed: bool
) -> None:
    monkeypatch.chdir(ROOT)
    reward = f"reward={RECIPES / 'custom_reward.py'}:score"
    run = f"log_path={tmp_path / 'run'}"
    where = ["dataset.sandbox=recipes"] if enclosed else []
    done = typed("train", "program=sh recipes/agent.sh", *SMALL, *where, reward, run)
    assert done.returncode == 0, done.stderr
    with open(tmp_path / "run" / "rollouts.jsonl", encoding="utf-8") as file:
        turn = json.loads(file.readline())["turns"][0]
    assert turn["action"] == json.loads(turn["logs"]["result"])["answer"]
    trust = words_for("sh recipes/agent.sh", "recipes" if enclosed else None)
    done = typed("evaluate", run, "attempts=1", f"trust={RECIPES / 'custom_reward.py'},{trust}")
    assert done.returncode == 0, done.stderr


SLOW = """
import http.client, json, os, sys, time, urllib.parse
row = json.load(sys.stdin)
url = urllib.parse.urlsplit(os.environ["OPENAI_BASE_URL"])
connection = http.client.HTTPConnection(url.hostname, url.port)
body = json.dumps({"model": "", "prompt": row["numbers"] + "=" + str(row["target"]) + "\\n"})
key = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
connection.request("POST", url.path + "/completions", body, key)
text = json.loads(connection.getresponse().read())["choices"][0]["text"]
time.sleep(0.1)
print(json.dumps({"reward": text.count("1")}))
"""


def test_a_run_is_killed_with_its_programs_and_resumed_to_the_same_history(
    tmp_path: Path, programs: Programs
) -> None:
    program = tmp_path / "slow.py"
    program.write_text(SLOW)
    command = f"program={sys.executable} -I -S {program}"
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    words = ("train", command, *SMALL, "optimizer.population_size=16")
    assert typed(*words, f"log_path={whole}").returncode == 0

    files = [os.devnull, tmp_path / "out", tmp_path / "err"]
    process = programs.start(["-m", "es_cookbook", *words, f"log_path={killed}"], files)
    wait_until(lambda: num_recorded(killed) == 1)
    wait_until(lambda: len(running(str(program))) >= 30)
    os.kill(process, signal.SIGKILL)
    programs.exit_code()
    if shutil.which("setpriv"):
        wait_until(lambda: not running(str(program)))
    done = typed(*words, f"log_path={killed}", "behavior_if_log_dir_exists=resume")
    assert done.returncode == 0, done.stderr
    one, other = (path / "history.jsonl" for path in (killed, whole))
    assert one.read_bytes() == other.read_bytes()


def running(word: str) -> list[int]:
    """Processes with this word in their command."""
    found = psutil.process_iter(["cmdline"])
    return [process.pid for process in found if word in (process.info["cmdline"] or ())]


def wait_until(until: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not until():
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["program=no-such-program x"], "'no-such-program' is neither a program of PATH nor"),
        (["program=./agent.sh"], "'./agent.sh' is neither a program of PATH nor"),
        (["program=sh 'agent.sh"], "No closing quotation"),
        (["program=sh agent.sh", "reward=wrong.py:three"], "cannot be called as a reward is"),
        (["program=sh agent.sh", "reward=number"], "questions.jsonl, line"),
        (["program=sh agent.sh", "dataset.at_once=0"], "at_once must be at least 1"),
        (["program=sh agent.sh", "dataset.sandbox=nowhere"], "there is no 'nowhere'"),
        pytest.param(
            ["program=./inside.sh", "dataset.sandbox=seen"],
            "'./inside.sh' is not seen inside, where there are /usr",
            marks=needs_sandbox,
        ),
    ],
)
def test_invalid_programs_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "agent.sh").write_text("exit")
    (tmp_path / "seen").mkdir()
    (tmp_path / "inside.sh").write_text("exit")
    (tmp_path / "inside.sh").chmod(0o755)
    (tmp_path / "wrong.py").write_text("def three(a):\n    return 0\n")
    assert said in refused("train", *words, ROWS, f"model_name={BUNDLED_MODEL}")


def test_trust_in_a_program_depends_on_its_sandbox() -> None:
    fields: dict[str, Any] = {"source": "rows.jsonl", "program": "sh agent.sh"}
    inside, outside, wider = (
        {each.word for each in reached(ProgramRows(**fields, sandbox=sandbox))}
        for sandbox in (("code",), (), ("code", "/"))
    )
    assert not inside & outside and not inside & wider and not outside & wider


def test_the_program_of_a_recorded_run_needs_trust(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "agent.sh").write_text("touch ran; exit 1")
    fails = ["program=sh agent.sh", "size=none", "log_path=run"]
    assert typed("train", *SMALL, *fails).returncode != 0
    assert (tmp_path / "ran").exists()
    os.remove(tmp_path / "ran")
    said = refused("evaluate", "log_path=run")
    assert "'sh agent.sh' is a program that is run" in said and "trust=program:" in said
    assert not (tmp_path / "ran").exists()
