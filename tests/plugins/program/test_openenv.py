"""Environments of OpenEnv, served by its own package, that recipes/openenv_agent.py plays."""

import importlib.util
import json
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from es_cookbook.plugins.program.env import ProgramProblem
from tests.plugins.program.test_env import only, problem, run

pytestmark = [
    pytest.mark.xdist_group("programs"),
    pytest.mark.skipif(
        importlib.util.find_spec("openenv") is None, reason="openenv-core is not installed"
    ),
]

AGENT = Path(__file__).parents[3] / "recipes" / "openenv_agent.py"
SERVER = """
from starlette.applications import Starlette
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

class Guess(Action):
    message: str

class Range(Action):
    low: int
    high: int

class Hint(Observation):
    hint: str = ""

class Guessing(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None):
        assert seed is not None, "this needs a seed"
        self.secret, self.turns = seed % 10, 0
        return Hint(hint="Guess a digit.", reward=0.0)

    def step(self, action, timeout_s=None):
        if isinstance(action, Range):
            low, high = action.low, action.high
        else:
            low = high = int(action.message)
        self.turns += 1
        if low == high == self.secret:
            return Hint(hint="Yes.", reward=1.0, done=True)
        hint = "lower" if self.secret < low else "higher" if self.secret > high else "inside"
        return Hint(hint=hint, reward=-0.25, done=self.turns == 4)

    @property
    def state(self):
        return State(step_count=self.turns)

app = Starlette()
app.mount("/text", create_app(Guessing, Guess, Hint, max_concurrent_envs=8))
app.mount("/fields", create_app(Guessing, Range, Hint, max_concurrent_envs=8))
"""


@pytest.fixture(scope="module")
def urls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Addresses of environments, by name; one process serves all."""
    folder = tmp_path_factory.mktemp("openenv")
    (folder / "guessing.py").write_text(SERVER)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    command = [sys.executable, "-m", "uvicorn", "guessing:app", "--port", port]
    server = subprocess.Popen([*command, "--log-level", "warning"], cwd=folder)
    found = {name: f"http://127.0.0.1:{port}/{name}" for name in ("text", "fields")}
    try:
        _wait_for(found["text"])
        yield found
    finally:
        server.kill()
        server.wait()


def _wait_for(url: str, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while True:
        try:
            with urllib.request.urlopen(f"{url}/health"):
                return
        except OSError:
            assert time.monotonic() < end, f"{url} does not answer"
            time.sleep(0.1)


def played(folder: Path, url: str, seeds: Sequence[int] = (14,)) -> list[ProgramProblem]:
    command = (sys.executable, str(AGENT), url)
    return [problem(folder, "", {"seed": s}, words=command, rows_at_once=16) for s in seeds]


async def test_the_answer_is_the_action_if_the_action_is_one_text_field(
    tmp_path: Path, urls: dict[str, str]
) -> None:
    def say(genome: int, shown: str) -> str:
        hint = re.findall(r"user\n(.*?)<", shown, re.DOTALL)[-1]
        if genome == 0:
            return "9"
        return {"Guess a digit.": "4" if genome == 1 else "2", "higher": "4", "lower": "0"}[hint]

    groups, _ = await run(played(tmp_path, urls["text"], [14, 20]), say)
    assert [only(groups[:1], g).reward for g in range(3)] == [-1, 1, 0.75]
    assert [only(groups[1:], g).reward for g in range(3)] == [-1, 0.75, 0.75]
    assert only(groups).transitions[-1].metrics["turns"] == 4


async def test_other_actions_are_tool_calls_and_errors_are_returned(
    tmp_path: Path, urls: dict[str, str]
) -> None:
    def say(genome: int, shown: str) -> str:
        if genome == 2:
            return "I give up."
        assert '"low"' in shown and '"metadata"' not in shown
        low = 4 if genome == 0 or "Invalid" in shown else "four"
        call = {"name": "step", "arguments": {"low": low, "high": 4}}
        return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"

    groups, _ = await run(played(tmp_path, urls["fields"]), say)
    assert [only(groups, g).reward for g in range(3)] == [1, 1, 0]
    assert [only(groups, g).transitions[-1].metrics["turns"] for g in range(3)] == [1, 2, 1]
