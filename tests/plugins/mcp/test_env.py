"""Rollouts whose model calls tools of real servers, and of servers that misbehave."""

import contextlib
import functools
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

import anyio
import psutil
import pytest

from es_cookbook.common.errors import EnvError
from es_cookbook.evolution.genome import Genome, Term
from es_cookbook.plugins.mcp.env import RowEnv
from es_cookbook.plugins.mcp.servers import Server
from es_cookbook.plugins.mcp.sessions import listed
from es_cookbook.population.sampler import PopulationSampler
from es_cookbook.rl.data.rows import Row
from es_cookbook.rl.messages.chat import Chat, ChatOptions
from es_cookbook.rl.messages.message import ToolCall, call_text
from es_cookbook.rl.problem_env import ProblemGroupBuilder
from es_cookbook.rl.types import LostRollout, SamplingParams, Trajectory
from tests.chat_templates import CHATML, tokenizer_with
from tests.plugins.program.test_env import Talker

pytestmark = pytest.mark.xdist_group("programs")

REAL = """
import os, sys
from mcp.server.mcpserver import MCPServer
from mcp.types import ImageContent, TextContent

server = MCPServer("real")
calls = 0

@server.tool()
def divide(a: int, b: int) -> float:
    "Divide two numbers."
    return a / b

@server.tool()
def count() -> str:
    "Count the calls that this server had."
    global calls
    calls += 1
    return f"{calls} of {os.getpid()}"

@server.tool()
def picture() -> list[TextContent | ImageContent]:
    "A picture."
    text = TextContent(type="text", text="seen")
    return [text, ImageContent(type="image", data="AAAA", mime_type="image/png")]

if sys.argv[1:]:
    server.run("streamable-http", port=int(sys.argv[1]))
else:
    server.run()
"""
STUB = """
import json, os, sys, time
def say(**message):
    print(json.dumps({"jsonrpc": "2.0", **message}), flush=True)
def result(id, text):
    say(id=id, result={"content": [{"type": "text", "text": text}]})
def tools():
    return [{"name": "t", "inputSchema": {"type": "object"}}]
def call(id, arguments):
    result(id, "done")
CODE
for line in sys.stdin:
    asked = json.loads(line)
    if asked["method"] == "initialize":
        about = {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}}
        say(id=asked["id"], result={**about, "serverInfo": {"name": "stub", "version": "1"}})
    elif asked["method"] == "tools/list":
        say(id=asked["id"], result={"tools": tools()})
    elif asked["method"] == "tools/call":
        call(asked["id"], asked["params"]["arguments"])
    elif "id" in asked:
        say(id=asked["id"], error={"code": -32601, "message": "no such method"})
"""
"""A server of a few lines, of the protocol before; `CODE` redefines what it does."""
GENOMES = [Genome((Term(seed, 0.5),)) for seed in range(3)]
CALL = ToolCall("t", {})


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("real") / "server.py"
    path.write_text(REAL)
    return f"{sys.executable} {path}"


@pytest.fixture(scope="module")
def url(real: str) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = subprocess.Popen([*real.split(), str(port)], stderr=subprocess.DEVNULL)
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            break
        except OSError:
            time.sleep(0.02)
    yield f"http://127.0.0.1:{port}/mcp"
    process.kill()
    process.wait()


@pytest.fixture
def stub(tmp_path: Path) -> Callable[..., Server]:
    def made(code: str, **settings: Any) -> Server:
        path = tmp_path / f"stub_{abs(hash(code))}.py"
        path.write_text(STUB.replace("CODE", code))
        return Server(f"{sys.executable} -I -S {path}", **{"timeout": 20.0, **settings})

    return made


def score(text: str, row: Any) -> tuple[float, dict[str, float]]:
    return float(text == row["answer"]), {"length": float(len(text))}


async def chat(*servers: Server, **options: Any) -> Chat:
    tools = [each for server in servers for each in await listed(server)]
    return Chat(tokenizer_with(CHATML), ChatOptions(**{"max_turns": 3, **options}), tools)


async def run(
    chat: Chat,
    *calls: ToolCall,
    genomes: Sequence[Genome] = GENOMES,
    answer: str = "done",
    rollout_timeout: float = 60,
) -> list[Trajectory | LostRollout]:
    """What becomes of genomes that make a call a turn, and then repeat the last result."""

    def say(genome: int, shown: str) -> str:
        results = re.findall(r"<tool_response>\n(.*?)\n</tool_response>", shown, re.DOTALL)
        return (
            call_text(calls[len(results)], "hermes") if len(results) < len(calls) else results[-1]
        )

    row = Row("rows.jsonl, line 1", {"answer": answer})
    env = functools.partial(RowEnv, chat, "Well?", score, row, None)
    sampling = SamplingParams(max_tokens=500)
    sampler = PopulationSampler(
        Talker(say),
        sampling=sampling,
        run_seed=3,
        max_failed_fraction=1.0,
        rollout_timeout=rollout_timeout,
    )
    (group,) = await sampler.rollout(0, [ProblemGroupBuilder(env, row.where)], genomes)
    return [trajectory for (trajectory,) in group.trajectories_G_K]


def texts(found: Sequence[Trajectory | LostRollout]) -> list[str]:
    """What each genome said at last, which is what it was told."""
    assert all(isinstance(each, Trajectory) for each in found), found
    return [each.transitions[-1].action.text for each in found if isinstance(each, Trajectory)]


def reasons(found: Sequence[Trajectory | LostRollout]) -> set[str]:
    assert all(isinstance(each, LostRollout) for each in found), found
    return {each.reason for each in found if isinstance(each, LostRollout)}


def children() -> list[psutil.Process]:
    """Servers that this process has started."""
    found: list[psutil.Process] = []
    for each in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # It may end meanwhile.
            if any("-S" in word for word in each.cmdline()):
                found.append(each)
    return found


DIVIDE = ToolCall("divide", {"a": 7, "b": 2})


async def test_calls_are_run_by_a_real_server_and_results_and_errors_are_told(real: str) -> None:
    talk = await chat(Server(real))
    assert [each.name for each in talk.tools] == ["divide", "count", "picture"]
    assert texts(await run(talk, DIVIDE)) == ["3.5"] * 3
    assert texts(await run(talk, ToolCall("picture", {})))[0] == "seen\n[image left out]"
    (error,) = set(texts(await run(talk, ToolCall("divide", {"a": 7, "b": 0}))))
    assert error.startswith("error: Error executing tool divide")
    (error,) = set(texts(await run(talk, ToolCall("divide", {"a": "x"}))))
    assert error.startswith("error: Error executing tool divide: 2 validation errors")
    (error,) = set(texts(await run(talk, ToolCall("divid", {}))))
    assert error.startswith("error: there is no tool 'divid'; did you mean 'divide'?")
    # What the protocol cannot carry is the model's mistake, and harms no rollout beside it.
    (error,) = set(texts(await run(talk, ToolCall("divide", {"a": "\ud800"}))))
    assert error == "error: divide: the arguments are nested too deeply, or no text"
    seen = [each.partition(" of ") for each in texts(await run(talk, ToolCall("count", {})))]
    assert sorted(count for count, _, _ in seen) == ["1", "2", "3"]
    assert len({pid for _, _, pid in seen}) == 1


async def test_a_server_for_each_rollout_keeps_its_state_from_turn_to_turn(real: str) -> None:
    count = ToolCall("count", {})
    talk = await chat(Server(real, per_rollout=True))
    found = texts(await run(talk, count, count, genomes=GENOMES[:2]))
    seen = [each.partition(" of ") for each in found]
    assert [number for number, _, _ in seen] == ["2", "2"]
    pids = {int(pid) for _, _, pid in seen}
    assert len(pids) == 2 and not any(map(psutil.pid_exists, pids))


async def test_metrics_and_limits_are_those_of_other_chats(stub: Callable[..., Server]) -> None:
    found = await run(await chat(stub("")), CALL)
    assert isinstance(found[0], Trajectory) and found[0].reward == 1.0
    last = found[0].transitions[-1].metrics
    assert last["tool_calls"] == 1 and last["turns"] == 2 and last["length"] == 4
    found = await run(await chat(stub("")), CALL, CALL, CALL, answer="")
    # Without an answer it is scored as an empty one.
    assert isinstance(found[0], Trajectory) and found[0].reward == 1.0
    last = found[0].transitions[-1].metrics
    assert last["turn_limit"] == 1 and last["length"] == 0


ONCE = """
def once(name):
    "Whether it is the first time."
    try:
        return os.open(os.path.join(os.path.dirname(sys.argv[0]), name), os.O_CREAT | os.O_EXCL)
    except FileExistsError:
        return None
"""


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("def call(*_): time.sleep(60)", r"did not answer within 2 s"),
        ("def call(*_): print('why', file=sys.stderr); os._exit(3)", "ended with exit code 3: why"),
        (
            "def call(id, _): say(id=id, result={'content': 3})",
            "something other than a tool's result",
        ),
        ("def call(id, _): say(id=id + 7, result={})", "did not answer within"),
        ("def call(id, _): say(id=id, error={'code': -32603, 'message': 'a\\x1b'})", r"r: a\\x1b$"),
        ("def call(id, _): result(id, 'x' * 5_000_000)", "more than 4 MiB"),
        ("def call(*_):\n while True: sys.stdout.write('x' * 99_999)", "more than 4 MiB"),
        ("def call(*_):\n while True: say(id=7, method='ping')", "than 1,024 messages at once"),
        (
            "def call(*_):\n while True: say(id='x' * 99_999, method='ping'); time.sleep(0.01)",
            "than 4 MiB unread",
        ),
        # An error of its own, by a code that the library uses for a connection that has ended.
        ("def call(id, _): say(id=id, error={'code': -32000, 'message': 'busy'})", "error: busy$"),
    ],
)
async def test_a_server_that_fails_loses_the_rollout_and_another_serves_the_next(
    stub: Callable[..., Server], code: str, said: str
) -> None:
    fails = f"{ONCE}\nif once('failed'):\n " + code.replace("\n", "\n ")
    server = stub(fails, timeout=2.0 if "did not" in said else 20.0)
    talk = await chat(server)
    (lost,) = reasons(await run(talk, CALL, genomes=GENOMES[:1]))
    assert lost.startswith("EnvError: the MCP server '") and re.search(said, lost)
    assert texts(await run(talk, CALL)) == ["done"] * 3


async def test_calls_under_way_end_with_the_server_and_with_one_that_is_only_slow_do_not(
    stub: Callable[..., Server],
) -> None:
    dies = "n = 0\ndef call(id, _):\n global n\n n += 1\n if n == 3: os._exit(1)"
    assert "ended with exit code 1" in reasons(await run(await chat(stub(dies)), CALL)).pop()
    slow = "n = 0\ndef call(id, _):\n global n\n n += 1\n if n != 2: result(id, 'done')"
    found = await run(await chat(stub(slow, timeout=2.0)), CALL)
    assert sorted(type(each).__name__ for each in found) == ["LostRollout", *["Trajectory"] * 2]


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("print('no module', file=sys.stderr); sys.exit(2)", "ended with exit code 2: no module"),
        ("time.sleep(60)", "did not answer within 0.5 s"),
        ("def tools(): return 3", "answered with something other than a list of tools"),
        (
            "def tools(): return [{'name': 't', 'inputSchema': {'type': 3}}]",
            "something other than a list of tools",
        ),
    ],
)
async def test_a_server_that_cannot_be_used_says_why(
    stub: Callable[..., Server], code: str, said: str
) -> None:
    with pytest.raises(EnvError) as caught:
        await listed(stub(code, timeout=0.5 if "did not" in said else 20.0))
    assert said in str(caught.value) and str(caught.value).count("the MCP server") == 1
    with anyio.fail_after(10):
        while children():
            await anyio.sleep(0.01)


async def test_a_server_that_writes_much_text_and_other_messages_works(
    stub: Callable[..., Server],
) -> None:
    much = """
def call(id, _):
    print("a log", flush=True)
    say(id=str(id + 9), result={})
    for each in range(999): say(method="notifications/progress", params={"progress": each})
    result(str(id), '[],{"' * 199_999)
    result(id, "again")
"""
    (text,) = set(texts(await run(await chat(stub(much)), CALL, genomes=GENOMES[:1])))
    assert text.startswith('[],{"[],{"') and text.endswith(" more characters]")


async def test_a_tool_that_is_no_longer_what_the_model_was_told_loses_the_rollout(
    stub: Callable[..., Server],
) -> None:
    other = f"""{ONCE}
if not once("listed"):
    def tools():
        return [{{"name": "t", "inputSchema": {{"type": "object", "required": ["x"]}}}}]
"""
    talk = await chat(stub(other, per_rollout=True))
    assert "no longer has the tool 't' as it was" in reasons(await run(talk, CALL)).pop()


async def test_what_a_server_of_a_rollout_has_started_ends_with_it(
    stub: Callable[..., Server],
) -> None:
    leaves = """
import subprocess
def call(id, _):
    sleeper = [sys.executable, "-I", "-S", "-c", "import time; time.sleep(60)"]
    subprocess.Popen(sleeper, stdout=subprocess.DEVNULL)
    result(id, "done")
"""
    talk = await chat(stub(leaves, per_rollout=True, at_once=1))  # One after the other.
    assert texts(await run(talk, CALL)) == ["done"] * 3
    assert not children()


def test_a_shared_server_ends_with_the_event_loop(stub: Callable[..., Server]) -> None:
    server = stub("import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)")

    async def use() -> None:
        assert texts(await run(await chat(server), CALL)) == ["done"] * 3
        assert len(children()) == 1

    anyio.run(use)
    assert not children()


@pytest.mark.parametrize("per_rollout", [False, True])
async def test_a_server_on_http_gives_the_same(url: str, per_rollout: bool) -> None:
    talk = await chat(Server(url, per_rollout))
    assert texts(await run(talk, DIVIDE)) == ["3.5"] * 3
    assert texts(await run(talk, ToolCall("divide", {"a": 7, "b": 0})))[0].startswith("error: ")


async def test_a_server_that_is_not_there_says_so() -> None:
    with pytest.raises(EnvError, match="cannot be talked to: "):
        await listed(Server("http://127.0.0.1:1/mcp"))


HTTP = """
import http.server, json, sys
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def log_message(self, *_): pass
    def begin(self, kind, code=200, **headers):
        self.send_response(code)
        for name, value in {"content-type": kind, "connection": "close", **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.close_connection = True
    def reply(self, id, result):
        self.begin("application/json")
        self.wfile.write(json.dumps({"jsonrpc": "2.0", "id": id, "result": result}).encode())
    def event(self, **message):
        self.wfile.write(b"data: " + json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\\n\\n")
    def do_GET(self): self.begin("text/plain", 405)
    def do_DELETE(self): self.begin("text/plain")
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        id, method = asked.get("id"), asked.get("method")
        if method == "initialize":
            about = {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}}
            self.begin("application/json", **{"mcp-session-id": "s"})
            result = {**about, "serverInfo": {"name": "stub", "version": "1"}}
            self.wfile.write(json.dumps({"jsonrpc": "2.0", "id": id, "result": result}).encode())
        elif method == "tools/list":
            self.reply(id, {"tools": [{"name": "t", "inputSchema": {"type": "object"}}]})
        elif method == "tools/call":
            self.call(id, {"content": [{"type": "text", "text": "done"}]})
        else:
            self.begin("text/plain", 404 if "id" in asked else 202)
    def call(self, id, done):
        CODE
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
print(server.server_address[1], flush=True)
server.serve_forever()
"""
"""As `STUB`, over HTTP."""


@contextlib.contextmanager
def on_http(code: str) -> Generator[str]:
    """The URL of a server whose `call` is this."""
    command = [sys.executable, "-I", "-c", HTTP.replace("CODE", code)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as server:
        try:
            assert server.stdout is not None
            yield f"http://127.0.0.1:{int(server.stdout.readline())}/mcp"
        finally:
            server.kill()


EVENTS = "self.begin('text/event-stream'); "


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("self.reply(id, done)", None),
        (EVENTS + "self.event(id=1, method='ping'); self.event(id=id, result=done)", None),
        ("self.begin('text/plain', 307)", "Unexpected content type"),
        ("self.begin('text/plain', 500)", "Server returned an error response"),
        (EVENTS + "self.wfile.write(b'data: {')", "ended without a response$"),
        (
            "self.begin('application/json'); self.wfile.write(b' ' * 9_000_000)",
            "than 4 MiB at once",
        ),
        (EVENTS + "self.event(method='x', a='b' * 9_000_000)", "stream ended without a response"),
        ("import os; os._exit(1)", "Server disconnected without sending a response"),
    ],
)
async def test_a_server_on_http_that_fails_loses_the_rollout_and_says_why(
    code: str, said: str | None
) -> None:
    with on_http(code) as url:
        found = await run(await chat(Server(url)), CALL, genomes=GENOMES[:1])
        if said is None:
            assert texts(found) == ["done"]
        else:
            (lost,) = reasons(found)
            assert re.search(said, lost), lost
