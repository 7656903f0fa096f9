"""A run with the tools of a server, from the command line: shared or not, killed, and refused."""

import hashlib
import json
import re
import sys
from pathlib import Path
from unittest import mock

import pytest

from es_cookbook.runs.tracking.jsonl import read_metrics
from tests.plugins.mcp.test_env import STUB
from tests.plugins.program.test_train import running
from tests.said import SMALL_ROWS, refused, typed

pytestmark = pytest.mark.xdist_group("programs")

ROOT = Path(__file__).parents[3]
MODEL = f"model_name={ROOT / 'es_cookbook/recipes/calculator/model'}"
CALCULATE = """
import re
def tools():
    expression = {"type": "object", "properties": {"expression": {"type": "string"}}}
    return [{"name": "calculate", "inputSchema": expression}]
def call(id, arguments):
    a, operation, b = re.fullmatch(r"(\\d+)([-+*])(\\d+)", arguments["expression"]).groups()
    a, b = int(a), int(b)
    time.sleep(SECONDS)
    result(id, str({"+": a + b, "-": a - b, "*": a * b}[operation]))
"""
SMALL = (
    *SMALL_ROWS,
    *("reward=number", "dataset.chat.tools_in=nowhere", "sampling.max_tokens=24", MODEL),
)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with rows, a server, and one that is slow."""
    monkeypatch.chdir(tmp_path)
    rows = [(f"{b}*{c}+{a}", a + b * c) for a in (11, 47, 83) for b in (12, 38) for c in (15, 92)]
    lines = [json.dumps({"question": f"{asked}=", "answer": answer}) for asked, answer in rows]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    for name, seconds in (("server.py", "0"), ("slow.py", "0.1")):
        code = STUB.replace("CODE", CALCULATE.replace("SECONDS", seconds))
        (tmp_path / name).write_text(code)
    return tmp_path


def words(server: str, *more: str) -> tuple[str, ...]:
    tools = f"tools=mcp:{sys.executable} -I -S {server}"
    return ("train", tools, "data=rows.jsonl", *SMALL, *more)


def test_a_server_for_all_and_one_for_each_rollout_give_the_same_history(here: Path) -> None:
    """The shared one is of the package mcp, and has the same tool."""
    recipe = f"tools=mcp:{sys.executable} {ROOT / 'recipes/calculator_server.py'}"
    for tools, servers in ((recipe, "shared"), (words("server.py")[1], "rollout")):
        options = f"log_path={servers}", f"dataset.servers={servers}"
        done = typed("train", tools, "data=rows.jsonl", *SMALL, *options)
        assert done.returncode == 0, done.stderr
    history = (here / "shared/history.jsonl").read_bytes()
    assert history == (here / "rollout/history.jsonl").read_bytes()
    first = read_metrics(here / "shared/metrics.jsonl")[0]
    assert first["env/all/tool_calls"] == 2 and first["env/all/tool_errors"] == 0
    assert first["test/reward/mean"] > 0
    digest = hashlib.sha256(recipe.removeprefix("tools=").encode()).hexdigest()[:16]
    done = typed("evaluate", "log_path=shared", "attempts=1", f"trust=mcp:{digest}")
    assert done.returncode == 0, done.stderr
    assert not running("server.py")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["tools=python server.py"], "accepted are mcp:COMMAND and mcp:http"),
        (["tools=mcp:http://192.0.2.1/mcp"], "a server must be on this machine"),
        (["tools=mcp:no-such-program"], "dataset.tools: 'no-such-program' is neither a program"),
        (["tools=mcp:sh -c 'exit 3'"], "exit 3'\" ended with exit code 3"),
        (["tools=mcp:{server}, mcp:{server}"], "2 tools have the name 'calculate'"),
        (["tools=mcp:{server}", "dataset.tool_timeout=0"], "tool_timeout must be above 0"),
        (["tools=mcp:{server}", "dataset.gold=none"], "its own solution earns 0 of 1: 'none'"),
    ],
)
def test_what_cannot_be_used_is_refused(here: Path, options: list[str], said: str) -> None:
    server = f"{sys.executable} -I -S server.py"
    filled = [option.replace("{server}", server) for option in options]
    assert said in refused("train", "data=rows.jsonl", *SMALL, *filled)


def test_the_missing_package_is_named(here: Path) -> None:
    gone = {"mcp": None, "es_cookbook.plugins.mcp.sessions": None}
    with mock.patch.dict(sys.modules, gone):
        del sys.modules["es_cookbook.plugins.mcp.sessions"]
        said = refused(*words("server.py"))
    assert re.search(r"dataset\.tools needs mcp, which is not .*'es-cookbook\[mcp\]'", said)
