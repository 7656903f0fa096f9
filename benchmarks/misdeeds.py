"""Training beside programs that do what they should not: what ends them, and what it costs.

    python -m benchmarks.misdeeds
    python -m benchmarks.misdeeds alone0 worker1 -- hang flood

A small run trains on four rows; on three of them a program behaves; on the fourth it does one of
the misdeeds of the tests, or one that would be too much for them. Each run is a fork of this
process, which has imported what a run needs. It has to end well, with both generations, within 1.5
times the time of the run whose fourth program just sleeps until `rollout_timeout`, with 100 MB more
at most, and leave no process and no temporary file. A line says how many rollouts of the first
generation were lost and why, the share that ended at `max_turns`, the time, and the size of the
largest process.
"""

import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import psutil
import transformers  # noqa: F401  # pyright: ignore[reportUnusedImport]

from benchmarks.harness import Row, report, row
from benchmarks.hostile import called
from es_cookbook.engines.torch import host  # noqa: F401  # pyright: ignore[reportUnusedImport]
from es_cookbook.recipes.countdown.train_cli import BUNDLED_MODEL
from tests.plugins.program.test_env import ASK, BOTH, MISDEEDS
from tests.programs import num_recorded

SECONDS, MEGABYTES = 1.5, 100.0
SLEEPS = "time.sleep(600)"
_MARK = f"misdeeds {os.getpid()}"
"""Marks the environment of all processes that a run starts outside a sandbox."""
MORE: Mapping[str, str] = {
    "take memory": "ask('a')\nkept = []\nwhile len(kept) < 15: kept.append(b'x' * 10**8)\n"
    + SLEEPS,
    "take processes": "ask('a')\nfor n in range(500):\n  if not os.fork(): time.sleep(600)\n"
    + SLEEPS,
    "fill /tmp": "ask('a')\nif SANDBOX:\n  with open('/tmp/a', 'wb') as file:\n"
    "    while True: file.write(b'x' * 10**6)\n" + SLEEPS,
    "3,000 prompts x 128": "ask('a'); texts(['b'] * 3000, n=128); " + SLEEPS,
    "endless requests": "while True: ask('a')",
    "endless requests in parallel": "def more():\n  while True: ask('a')\n"
    "for n in range(50): Thread(target=more).start()",
    "requests after the result": "ask('a')\n"
    "print(json.dumps({'id': ID, 'reward': 1}), flush=True)\nwhile True: ask('a')",
    "many values": "ask('a'); a = '0,' * 262_000\n"
    'print(\'{"id": "\' + str(ID) + \'", "reward": 1, "a": [\' + a + \'0]}\', flush=True)',
    "many metrics": "ask('a'); many = {str(n): 0 for n in range(20_000)}\n"
    "print(json.dumps({'id': ID, 'reward': 1, 'metrics': many}), flush=True)",
}
HEAD = """
SANDBOX = not os.path.isdir("/proc")
def ask(text, url, key, **more):
    at = urllib.parse.urlsplit(url)
    connection = http.client.HTTPConnection(at.hostname, at.port)
    body = json.dumps({"model": "m", "prompt": "1+2=", "max_tokens": 4, **more})
    connection.request("POST", at.path + "/completions", body, {"Authorization": "Bearer " + key})
    found = json.loads(connection.getresponse().read())
    connection.close()
    return found["choices"][0]["text"] if "choices" in found else found["error"]
"""
"""The model of the recipe goes on with texts."""


def ran(home: Path, way: str, is_enclosed: bool, deed: str) -> tuple[float, float, list[str]]:
    """Return seconds and megabytes of a run, and its errors; print how rollouts ended."""
    code, settings = BOTH[way]
    (home / "work").mkdir(exist_ok=True)
    (home / "program.py").write_text(ASK + HEAD + code)
    rows = ["good"] * 3 + [{**MISDEEDS, **MORE}[deed]]
    lines = "".join(json.dumps({"question": each}) + "\n" for each in rows)
    (home / "rows.jsonl").write_text(lines)
    log_path = home / "run"
    shutil.rmtree(log_path, ignore_errors=True)
    words = (
        "train",
        f"program={sys.executable} -I -S {home / 'program.py'}",
        f"data={home / 'rows.jsonl'}",
        f"model_name={BUNDLED_MODEL}",
        f"log_path={log_path}",
        *("size=none", "batch=4", "num_generations=2", "dataset.num_test=0", "dataset.max_turns=8"),
        *("optimizer.population_size=4", "optimizer.sigma=0.01", "optimizer.learning_rate=0.02"),
        *("sampling.max_tokens=8", "rollout_timeout=3", "max_failed_fraction=1"),
        *(f"dataset.{name}={value}" for name, value in settings.items()),
        *((f"dataset.sandbox={home / 'program.py'}",) if is_enclosed else ()),
    )
    began = time.monotonic()
    outcome = called(home, home, words)
    seconds = time.monotonic() - began
    lost = re.findall(r"(\d+ of \d+) rollouts lost.*?genome \d: (.*?)(?:; its|\n)", outcome.said)
    limits = re.findall(r'"env/all/turn_limit": ([\d.]+)', _text(log_path / "metrics.jsonl"))
    left = len(_left())
    where = f"{way}{', sandbox' * is_enclosed}"
    size = f"{seconds:.1f} s | {outcome.megabytes:.0f} MB"
    print(f"| {where} | {deed} | {lost[:1]} {limits} | {size} | {left} |", flush=True)
    wrong = {
        f"exit code {outcome.code}: {outcome.said[-800:]}": outcome.code != 0,
        "lost generations": num_recorded(log_path) != 2,
        "processes left": left > 0,
        "files left": any(Path(tempfile.gettempdir()).glob("es_cookbook-*/tmp*")),
    }
    return seconds, outcome.megabytes, [name for name, is_so in wrong.items() if is_so]


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def _left() -> list[psutil.Process]:
    """Return processes of a run that has ended."""

    def is_ours(process: psutil.Process) -> bool:
        try:
            return process.pid != os.getpid() and process.environ().get("BENCHMARK") == _MARK
        except psutil.Error:
            return False

    return [process for process in psutil.process_iter() if is_ours(process)]


def measured(*words: str) -> list[Row]:
    """Measure all ways and deeds, or those that are named: ways (1 in a sandbox), `--`, deeds."""
    os.environ["BENCHMARK"] = _MARK
    at = words.index("--") if "--" in words else len(words)
    ways, deeds = words[:at] or ("alone0", "alone1", "worker0", "worker1"), words[at + 1 :]
    wrong: list[str] = []
    slowest = largest = 0.0
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        os.environ["TMPDIR"] = tempfile.tempdir = str(home / "tmp")
        Path(tempfile.tempdir).mkdir()
        for way in ("alone", "worker"):
            for is_enclosed in (False, True):
                if f"{way}{is_enclosed:d}" not in ways:
                    continue
                ran(home, way, is_enclosed, "hang")
                usual, size, _ = ran(home, way, is_enclosed, "hang")
                for deed in deeds or {**MISDEEDS, **MORE}:
                    seconds, megabytes, found = ran(home, way, is_enclosed, deed)
                    slowest = max(slowest, seconds / usual)
                    if deed == "take memory":  # Its own size is told.
                        megabytes = size
                    largest = max(largest, megabytes - size)
                    found += ["slow"] * (seconds > SECONDS * usual)
                    found += ["large"] * (megabytes > size + MEGABYTES)
                    wrong += [f"{way}, {is_enclosed}, {deed}: {each}" for each in found]
    for each in wrong:
        print(each)
    told = "runs beside programs that misbehave: "
    return [
        row(f"{told}a generation, a process or a file lost or left", [len(wrong)], "", at_most=0),
        row(
            f"{told}relative to one that sleeps until it is ended", [slowest], "x", at_most=SECONDS
        ),
        row(f"{told}memory above that", [largest], "MB", at_most=MEGABYTES),
    ]


if __name__ == "__main__":
    report("misdeeds", measured(*sys.argv[1:]))
