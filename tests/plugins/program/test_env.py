"""Programs as Envs: real processes ask over HTTP, and a fake engine answers at once."""

import asyncio
import dataclasses
import functools
import json
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import anyio
import psutil
import pytest
from typing_extensions import override

from es_cookbook.engines.base import SampleRequest
from es_cookbook.evolution.genome import Genome, Term
from es_cookbook.plugins.program.command import Command
from es_cookbook.plugins.program.env import Program, ProgramEnv, ProgramProblem
from es_cookbook.population.sampler import PopulationSampler
from es_cookbook.rl.data.rows import Row
from es_cookbook.rl.rewards.matching import Number
from es_cookbook.rl.types import Action, LostRollout, SamplingParams, Trajectory, TrajectoryGroup
from tests.chat_templates import CHATML, tokenizer_with
from tests.fakes import FakeEngine
from tests.families import sampled
from tests.sandboxes import needs_sandbox

pytestmark = pytest.mark.xdist_group("programs")

GENOMES = [Genome((Term(seed, 0.5),)) for seed in range(3)]
OWN_KEY = os.environ.get("OPENAI_API_KEY", "")
ASK = """
import http.client, json, os, sys, time, urllib.parse
def ask(text, url=None, key=None, path="/chat/completions", **more):
    url = urllib.parse.urlsplit(url or os.environ["OPENAI_BASE_URL"])
    key = key or os.environ["OPENAI_API_KEY"]
    connection = http.client.HTTPConnection(url.hostname, url.port)
    messages = [{"role": "user", "content": text}] if isinstance(text, str) else text
    body = json.dumps({"model": "gpt-9", "messages": messages, **more})
    connection.request("POST", url.path + path, body, {"Authorization": "Bearer " + key})
    found = json.loads(connection.getresponse().read())
    connection.close()
    return found["choices"][0]["message"]["content"] if "choices" in found else found["error"]
"""
WORKER = """
for line in sys.stdin:
    task = json.loads(line)
    def asked(text, **more):
        return ask(text, task["base_url"], task["api_key"], **more)
    row = task["row"]
"""


class Talker(FakeEngine):
    """Says what a function of the genome's number (-1 for none) and of what it is shown says."""

    def __init__(self, say: Callable[[int, str], str]) -> None:
        super().__init__(answer=self._said)
        self.traits = dataclasses.replace(self.traits, context_length=4000)
        self.tokenizer = tokenizer_with(CHATML)
        self._say = say

    @override
    async def sample(self, request: SampleRequest) -> Action:
        said = await super().sample(request)
        tokens_T = tuple(self.tokenizer.encode(said.text, add_special_tokens=False))
        return Action(tokens_T, said.text, "stop")

    def _said(self, who: Genome | str, request: SampleRequest) -> str:
        shown = str(self.tokenizer.decode(list(request.observation.tokens_T)))
        return self._say(-1 if isinstance(who, str) else who.terms[0].seed, shown)


def echo(genome: int, shown: str) -> str:
    """The genome's number, and the last thing that the user has said."""
    said = re.findall(r"user\n(.*?)<", shown, re.DOTALL)[-1]
    return f"{genome}:{said}"


def problem(
    folder: Path, code: str, row: Mapping[str, object] | None = None, **settings: Any
) -> ProgramProblem:
    """A row on which a program in Python works."""
    path = folder / f"program_{abs(hash(code))}.py"
    path.write_text(ASK + code)
    sandbox = tuple(settings.pop("sandbox", ()))
    words = settings.pop("words", (sys.executable, "-I", "-S", str(path)))
    program = Program(
        **{
            "command": Command(words, sandbox),
            "reward": None,
            "at_once": 64,
            "rows_at_once": 0,
            "max_turns": 8,
            "tokenizer": tokenizer_with(CHATML),
            **settings,
        }
    )
    made = Row("rows.jsonl, line 1", row or {"question": "1 + 2", "answer": 3})
    return ProgramProblem(functools.partial(ProgramEnv, program, made), made.where)


async def run(
    problems: Sequence[ProgramProblem],
    say: Callable[[int, str], str] = echo,
    genomes: Sequence[Genome] = GENOMES,
    kind: type[Talker] = Talker,
    **settings: Any,
) -> tuple[list[TrajectoryGroup], Talker]:
    engine = kind(say)
    given = {"sampling": SamplingParams(max_tokens=50), "run_seed": 3, "max_failed_fraction": 1.0}
    sampler = PopulationSampler(engine, **(given | settings))
    return list(await sampler.rollout(0, problems, genomes)), engine


def only(groups: Sequence[TrajectoryGroup], genome: int = 0) -> Trajectory:
    found = groups[0].trajectories_G_K[genome][0]
    assert isinstance(found, Trajectory), found
    return found


def rewards_and_pids(groups: Sequence[TrajectoryGroup]) -> tuple[list[list[float]], set[float]]:
    """Rewards of all genomes by problem, and which processes say that they gave them."""
    found = [[only([group], g) for g in range(len(group.trajectories_G_K))] for group in groups]
    pids = {each.transitions[-1].metrics["pid"] for each_G in found for each in each_G}
    return [[each.reward for each in each_G] for each_G in found], pids


def reason(groups: Sequence[TrajectoryGroup]) -> str:
    """Why the first rollout was lost."""
    found = groups[0].trajectories_G_K[0][0]
    assert isinstance(found, LostRollout), found
    return found.reason + found.traceback


TWICE = """
row = json.load(sys.stdin)
first = ask(row["question"])
chat = [{"role": "user", "content": row["question"]}, {"role": "assistant", "content": first}]
second = ask([*chat, {"role": "user", "content": "sure?"}])
print("working ...")
print(json.dumps({"reward": len(second) + int(second[0]), "metrics": {"said": len(first)}}))
"""


async def test_a_request_is_an_observation_and_its_response_the_action(tmp_path: Path) -> None:
    groups, engine = await run([problem(tmp_path, TWICE)])
    for genome in range(3):
        rollout = only(groups, genome)
        assert [step.action.text for step in rollout.transitions] == [
            f"{genome}:1 + 2",
            f"{genome}:sure?",
        ]
        first, second = rollout.transitions
        # The chat goes on from the tokens that were seen and sampled.
        before_T = first.observation.tokens_T + first.action.tokens_T
        assert second.observation.tokens_T[: len(before_T)] == before_T
        assert rollout.reward == 7 + genome
        assert second.metrics == {"said": 7, "turns": 2, "tool_calls": 0, "turn_limit": 0}
    seeds = [(who, request.seed) for who, request in engine.requests]
    assert len({seed for _, seed in seeds}) == 2, "the same for all genomes, one a turn"


async def test_an_answer_is_scored_by_a_reward(tmp_path: Path) -> None:
    code = """
print(json.dumps({"answer": ask("How much is " + json.load(sys.stdin)["question"] + "?")}))
"""

    def say(genome: int, shown: str) -> str:
        return "It is 3." if genome == 1 else "It is 4."

    groups, _ = await run([problem(tmp_path, code, reward=Number())], say)
    assert [only(groups, g).reward for g in range(3)] == [0, 1, 0]
    assert only(groups).transitions[-1].logs["answer"] == "4"


async def test_sampling_parameters_of_a_request_override_the_run_s(tmp_path: Path) -> None:
    code = """
ask("a"), ask("b", temperature=0.5, seed=11, max_tokens=7), ask("c", n=2, seed=20, top_p=0.5)
print('{"reward": 1}')
"""
    groups, engine = await run([problem(tmp_path, code)], genomes=GENOMES[:1])
    assert only(groups).reward == 1
    asked = [request for _, request in engine.requests]
    params = [request.params for request in asked]
    assert params[0] == SamplingParams(max_tokens=50)
    assert params[1] == SamplingParams(max_tokens=7, temperature=0.5)
    assert params[2] == params[3] == SamplingParams(max_tokens=50, top_p=0.5)
    assert [request.seed for request in asked[1:]] == [11, 20, 21]


DEEDS = """
from threading import Thread
def place():
    at = urllib.parse.urlsplit(URL)
    return at.hostname, at.port
def unread(text="a", path="chat/completions", **more):
    connection = http.client.HTTPConnection(*place())
    messages = {} if path == "completions" else {"messages": [{"role": "user", "content": text}]}
    headers = {"Authorization": "Bearer " + KEY}
    body = json.dumps({"model": "m", **messages, **more})
    connection.request("POST", "/v1/" + path, body, headers)
    return connection
def texts(prompts, **more):
    unread(path="completions", prompt=prompts, **more).getresponse().read()
plain = ask
def ask(text, **more):
    return plain(text, **{"url": URL, "key": KEY, **more})
"""
ALONE = "URL, KEY = (os.environ[name] for name in ('OPENAI_BASE_URL', 'OPENAI_API_KEY')); ID = 0\n"
DOES = """
if row["question"] == "good":
    who = {ask(str(n)).split(":")[0] for n in range(3)}
    print(json.dumps({"id": ID, "reward": float(len(who) == 1)}), flush=True)
else:
    exec(row["question"])
"""
BOTH: dict[str, tuple[str, dict[str, Any]]] = {
    "alone": (ALONE + DEEDS + "row = json.load(sys.stdin)" + DOES, {}),
    "worker": (
        "URL = KEY = ''"
        + DEEDS
        + "for line in sys.stdin:\n  task = json.loads(line); row = task['row']\n"
        + "  URL, KEY, ID = task['base_url'], task['api_key'], task['id']"
        + DOES.replace("\n", "\n  "),
        {"rows_at_once": 1},
    ),
}


def deed(folder: Path, way: str, code: str, **settings: Any) -> ProgramProblem:
    """A row whose program does this, unless the row is "good"."""
    whole, more = BOTH[way]
    return problem(folder, whole, {"question": code}, **{**more, **settings})


TOO_MUCH = {
    "in parallel": "for n in range(30): Thread(target=ask, args=(str(n),)).start()",
    "the most choices": "ask('a'); ask('b', n=128)",
    "prompts": "ask('a'); texts(['b'] * 3000, n=128)",
    "whatever it is told": "[ask(str(n)) for n in range(99)]; "
    "print(json.dumps({'id': ID, 'reward': 1}), flush=True)",
}


@pytest.mark.parametrize("way", ["alone", "worker"])
@pytest.mark.parametrize("code", TOO_MUCH.values(), ids=TOO_MUCH)
async def test_a_program_that_asks_too_often_ends_without_reward(
    tmp_path: Path, code: str, way: str
) -> None:
    groups, engine = await run([deed(tmp_path, way, code)], genomes=GENOMES[:2])
    assert [only(groups, g).reward for g in range(2)] == [0, 0]
    for g in range(2):
        assert only(groups, g).transitions[-1].metrics["turn_limit"] == 1
    assert len(engine.requests) == 2 * (1 if "ask('a')" in code else 8)


class Slow(Talker):
    """Takes long to answer, and is told when nobody wants that any more."""

    num_cancelled = 0

    @override
    async def sample(self, request: SampleRequest) -> Action:
        try:
            await asyncio.sleep(600)
            return await super().sample(request)
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise


async def test_requests_of_a_failed_program_are_cancelled_in_the_engine(tmp_path: Path) -> None:
    code = "Thread(target=ask, args=('a',)).start(); time.sleep(0.5); os._exit(3)"
    groups, engine = await run([deed(tmp_path, "alone", code)], genomes=GENOMES[:2], kind=Slow)
    assert "ended with exit code 3" in reason(groups)
    assert isinstance(engine, Slow) and engine.num_cancelled == 2


async def test_requests_whose_answer_is_not_read_are_counted(tmp_path: Path) -> None:
    made = deed(tmp_path, "alone", "for n in range(30): unread(str(n)).close()\ntime.sleep(60)")
    groups, engine = await run([made], genomes=GENOMES[:1], rollout_timeout=50)
    found = groups[0].trajectories_G_K[0][0]
    if isinstance(found, LostRollout):
        assert "before it waited for one" in found.reason
    else:
        assert found.transitions[-1].metrics["turn_limit"] == 1
    assert len(engine.requests) <= 8


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("ask('a'); sys.stderr.write('Sorry\\n'); sys.exit(3)", "exit code 3: Sorry\n  Sorry"),
        ("ask('a'); os.kill(os.getpid(), 9)", "was ended by SIGKILL"),
        ("print('{\"reward\": 1}')", "without a request to the model"),
        ("raise KeyError('lost')", "exit code 1"),
        ("ask('a'); print('done')", "printed no result"),
        ("ask('a'); print('x' * 2_000_000)", "more than 1 MiB"),
        ("ask('a'); time.sleep(60)", "(rollout_timeout)"),
        ("time.sleep(60)", "(rollout_timeout)"),
    ],
)
async def test_a_failed_program_loses_its_rollout_with_the_reason(
    tmp_path: Path, code: str, said: str
) -> None:
    seconds = 1.5 if "sleep" in code else 30
    groups, _ = await run([problem(tmp_path, code)], genomes=GENOMES[:1], rollout_timeout=seconds)
    assert said in reason(groups)
    assert not left_behind()


@pytest.mark.parametrize("enclosed", [False, pytest.param(True, marks=needs_sandbox)])
async def test_a_program_may_have_its_key_in_a_line(tmp_path: Path, *, enclosed: bool) -> None:
    code = """
task = json.load(sys.stdin)
assert task["api_key"] not in str(os.environ)
print(json.dumps({"reward": len(ask(task["row"]["question"], task["base_url"], task["api_key"]))}))
"""
    sandbox = (tmp_path,) if enclosed else ()
    groups, _ = await run([problem(tmp_path, code, is_key_in_line=True, sandbox=sandbox)])
    assert [only(groups, g).reward for g in range(3)] == [7] * 3


def left_behind() -> list[psutil.Process]:
    """Processes of rollouts that have ended; what was killed just now may take a moment."""
    end = time.monotonic() + 5
    while (found := _of_rollouts()) and time.monotonic() < end:
        time.sleep(0.02)
    return found


def _of_rollouts() -> list[psutil.Process]:
    """Processes with the key of a rollout."""
    found: list[psutil.Process] = []
    for process in psutil.process_iter():
        try:
            is_there = process.status() != psutil.STATUS_ZOMBIE
            key = process.environ().get("OPENAI_API_KEY", OWN_KEY)
        except psutil.Error:
            continue
        if is_there and key != OWN_KEY:
            found.append(process)
    return found


async def test_children_of_a_program_are_killed(tmp_path: Path) -> None:
    forks = """
import signal, subprocess
signal.signal(signal.SIGTERM, signal.SIG_IGN)
ask("a")
sleep = [sys.executable, "-I", "-S", "-c", "import time; time.sleep(60)"]
subprocess.Popen(sleep)
if os.fork() == 0:
    time.sleep(60)
print('{"reward": 1}')
"""
    began = time.monotonic()
    groups, _ = await run([problem(tmp_path, forks)])
    assert [only(groups, g).reward for g in range(3)] == [1, 1, 1]
    assert not left_behind()
    assert time.monotonic() - began < 30


async def test_the_key_of_a_program_expires_when_it_exits(tmp_path: Path) -> None:
    """The process that it leaves holds its output open, which is waited for.

    It may get an answer until the run learns that the program has exited.
    """
    told = tmp_path / "told"
    code = f"""
ask("a")
parent, (reading, writing) = os.getpid(), os.pipe()
if os.fork():
    os.read(reading, 1)
    print('{{"reward": 1}}', flush=True)
    os._exit(0)
os.setsid()
os.write(writing, b"x")
while os.getppid() == parent:
    time.sleep(0.01)
while isinstance(found := ask("b"), str):
    time.sleep(0.3)
open({str(told)!r}, "w").write(json.dumps(found))
"""
    groups, _ = await run([problem(tmp_path, code, max_turns=3)], genomes=GENOMES[:1])
    assert only(groups).reward == 1
    with anyio.fail_after(10):
        while not told.exists() or not told.read_text():
            await anyio.sleep(0.01)
    assert json.loads(told.read_text())["code"] == "invalid_api_key"


async def test_a_worker_lives_on_and_each_key_opens_only_its_own_row(tmp_path: Path) -> None:
    code = (
        "kept = []\n"
        + WORKER
        + """
    keys = [*kept, "nonsense"]
    wrong = [ask("x", task["base_url"], key)["code"] for key in keys]
    kept.append(task["api_key"])
    first = asked(row["question"])
    rights = set(wrong) == {"invalid_api_key"} and len(set(kept)) == len(kept)
    result = {"id": task["id"], "reward": len(first) + int(first[0]) if rights else -1}
    print(json.dumps({**result, "metrics": {"pid": os.getpid()}}), flush=True)
"""
    )
    rows = [{"question": "x" * n} for n in (1, 2, 3)]
    groups, _ = await run([problem(tmp_path, code, r, rows_at_once=1, at_once=1) for r in rows])
    rewards, pids = rewards_and_pids(groups)
    assert (rewards, len(pids)) == ([[3, 4, 5], [4, 5, 6], [5, 6, 7]], 1)
    assert [len(only(groups, g).transitions) for g in range(3)] == [1, 1, 1]


async def test_a_worker_that_fails_loses_its_rows_and_another_takes_over(tmp_path: Path) -> None:
    code = (
        WORKER
        + """
    text = asked(row["question"])
    if row["question"] == "die":
        sys.exit("It was too much")
    if row["question"] == "hang":
        time.sleep(60)
    print(json.dumps({"id": task["id"], "reward": 1}), flush=True)
"""
    )
    rows = [{"question": text} for text in ("a", "die", "hang", "b")]
    problems = [problem(tmp_path, code, row, rows_at_once=1, at_once=1) for row in rows]
    groups, _ = await run(problems, genomes=GENOMES[:1], rollout_timeout=6)
    found = [group.trajectories_G_K[0][0] for group in groups]
    assert [isinstance(each, Trajectory) for each in found] == [True, False, False, True]
    assert "exit code 1: It was too much" in reason(groups[1:])
    assert "rollout_timeout" in reason(groups[2:])


async def test_a_worker_answers_for_its_own_rows_once(tmp_path: Path) -> None:
    code = (
        WORKER
        + """
    first, question = asked("a"), row["question"]
    result = {"id": task["id"], "reward": 1, "metrics": {"pid": os.getpid()}}
    if question == "others":
        print(json.dumps({"id": "x", "reward": 7}), json.dumps({"id": [{}], "reward": 7}))
    print(json.dumps(result))
    if question == "twice":
        print(json.dumps({**result, "reward": 7}))
    sys.stdout.flush()
"""
    )
    settings = {"rows_at_once": 1, "at_once": 1}
    rows = [{"question": kind} for kind in ("others", "twice", "good")]
    problems = [problem(tmp_path, code, row, **settings) for row in rows]
    groups, _ = await run(problems, genomes=GENOMES[:1])
    rewards, pids = rewards_and_pids(groups)
    assert rewards == [[1]] * 3 and len(pids) == 1


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("print('x' * 2_000_000)", "it wrote more than 1 MiB for each row"),
        ("print('{\"id\": 1}\\n' * 999)", "it wrote more than 1 MiB for each row"),
        ("print('{\"a\": [' + '[],' * 200_000 + '0]}')", "a result is too large"),
        ("print('{\"reward\": 1}')", "a result without an id"),
    ],
)
async def test_a_worker_that_writes_too_much_is_ended(tmp_path: Path, code: str, said: str) -> None:
    code = f"{WORKER}\n    asked('a'); {code}; sys.stdout.flush(); time.sleep(60)"
    groups, _ = await run([problem(tmp_path, code, rows_at_once=1)], genomes=GENOMES[:1])
    assert said in reason(groups)


async def test_a_worker_may_have_many_rows_at_once(tmp_path: Path) -> None:
    """Its threads may print at the same time: two results in a line, then two ends of lines."""
    code = """
from threading import Lock, Thread
one, count = Lock(), 0
def work(task):
    global count
    text = ask(task["row"]["question"], task["base_url"], task["api_key"])
    line = json.dumps({"id": task["id"], "reward": int(text[0]), "metrics": {"pid": os.getpid()}})
    with one:
        count += 1
        print(line, end="" if count % 2 else "\\n\\n", flush=True)
for line in sys.stdin:
    Thread(target=work, args=(json.loads(line),)).start()
"""
    problems = [problem(tmp_path, code, rows_at_once=16, at_once=16) for _ in range(4)]
    groups, _ = await run(problems)
    rewards, pids = rewards_and_pids(groups)
    assert rewards == [[0, 1, 2]] * 4
    assert len(pids) == 1


MISDEEDS = {
    "hang": "ask('a'); time.sleep(60)",
    "crash": "ask('a'); os.abort()",
    "fork many": "ask('a')\nfor n in range(60):\n  if not os.fork(): time.sleep(60)\nos._exit(1)",
    "stop itself": "ask('a'); os.kill(os.getpid(), 19)",
    "ask without a key": "ask('a')\nwhile True: ask('a', key='nonsense')",
    "keep many sockets": "import socket; ask('a')\n"
    "kept = [socket.create_connection(place()) for n in range(200)]; time.sleep(60)",
    "flood": "ask('a')\nwhile True: sys.stdout.write('x' * 65536)",
    "flood the errors": "ask('a')\nwhile True: sys.stderr.write('x' * 65536)",
    "close its output": "ask('a'); os.close(1); time.sleep(60)",
    "send half a request": "import socket; kept = socket.create_connection(place());"
    " kept.sendall(b'POST /v1/chat/completions HTTP/1.1\\r\\n'); time.sleep(60)",
    "send 100 MB": "ask('x' * 100_000_000); sys.exit(5)",
    "end with its call": "Thread(target=ask, args=('a',)).start(); os._exit(0)",
}


@pytest.mark.parametrize("enclosed", [False, pytest.param(True, marks=needs_sandbox)])
@pytest.mark.parametrize("way", sampled(BOTH, 1))
async def test_misdeeds_lose_only_their_own_rollouts(
    tmp_path: Path, way: str, *, enclosed: bool
) -> None:
    settings = {"at_once": 24, "sandbox": (tmp_path,) if enclosed else ()}
    rows = [*MISDEEDS.values(), *["good"] * 4]
    problems = [deed(tmp_path, way, row, **settings) for row in rows]
    groups, _ = await run(problems, genomes=GENOMES[:2], rollout_timeout=6)
    for name, group in zip([*MISDEEDS, *["good"] * 4], groups, strict=True):
        for g in range(2):
            found = group.trajectories_G_K[g][0]
            assert isinstance(found, LostRollout) == (name != "good"), (name, found)
            if isinstance(found, Trajectory):
                assert [step.action.text for step in found.transitions] == [
                    f"{g}:{n}" for n in range(3)
                ]
                assert found.reward == 1
    if way == "alone":
        assert not left_behind()


INSIDE = """
import ctypes, socket
def fails(act, *args):
    try:
        act(*args)
    except OSError:
        return 1
    raise SystemExit(f"{args} could be done")
fails(socket.create_connection, ("127.0.0.1", int(row["port"])), 1)
fails(socket.create_connection, ("192.0.2.1", 80), 1)
fails(socket.socket(socket.AF_UNIX).connect, "\\0" + row["name"])
fails(open, row["secret"]), fails(os.listdir, "/proc"), fails(open, "/etc/passwd")
for path in (sys.argv[0], "/x"):
    fails(open, path, "w")
libc = ctypes.CDLL(None, use_errno=True)
assert libc.ptrace(0, 0, 0, 0) == -1 and ctypes.get_errno() == 1
names = {"PATH", "HOME", "LANG", "PWD", "LC_CTYPE", "OPENAI_BASE_URL", "OPENAI_API_KEY"}
assert not set(os.environ) - names, os.environ
print(json.dumps({"reward": len(ask("a"))}))
"""


@needs_sandbox
async def test_a_program_in_a_sandbox_reaches_the_model_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET", "told nobody")
    code, secret = tmp_path / "code", tmp_path / "secret"
    code.mkdir()
    secret.write_text("told nobody")
    name = f"es_cookbook {os.getpid()}"
    with (
        socket.create_server(("127.0.0.1", 0)) as neighbour,
        socket.socket(socket.AF_UNIX) as abstract,
    ):
        abstract.bind("\0" + name)
        abstract.listen()
        row = {"port": neighbour.getsockname()[1], "secret": str(secret), "name": name}
        inside = "row = json.load(sys.stdin)\n" + INSIDE
        groups, _ = await run([problem(code, inside, row, sandbox=(code,))])
    assert [only(groups, g).reward for g in range(3)] == [3] * 3
    assert not left_behind()


SMOLAGENTS = Path(__file__).parents[3] / "recipes" / "smolagents_agent.py"


@needs_sandbox
async def test_an_agent_of_smolagents_works_in_a_sandbox(tmp_path: Path) -> None:
    path = tmp_path / "agent.py"
    path.write_text(SMOLAGENTS.read_text())
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
    final = '<tool_call>\n{"name": "final_answer", "arguments": {"answer": "3"}}\n</tool_call>'

    def say(genome: int, shown: str) -> str:
        opened = '<tool_call>\n{"name": "'
        has_result = "tool_response>\n3" in shown or "Observation:\n3" in shown
        if not shown.endswith(opened):
            return "It is 3." if has_result else call
        return (final if has_result else call).removeprefix(opened)

    settings = {"words": (sys.executable, str(path)), "sandbox": (tmp_path,), "rows_at_once": 1}
    made = problem(tmp_path, "", reward=Number(), **settings)
    groups, _ = await run([made], say, GENOMES[:1], rollout_timeout=60)
    assert only(groups).reward == 1
    assert len(only(groups).transitions) == 2
    assert only(groups).transitions[-1].metrics["tool_calls"] >= 1
