"""Cost of programs as agents: of a request, and of many rollouts, beside the same task as an Env.

    OMP_NUM_THREADS=2 python -m benchmarks.agents
    OMP_NUM_THREADS=2 python -m benchmarks.agents pydantic_ai javascript smolagents

SmolLM2-135M-Instruct (`make chat-model`) is asked sums, "What is 52 + 18? Answer briefly.", and
answers greedily.

- A request's cost beyond the engine's: processor time of the server's process for a chat that is
  answered at once by a fixed answer of 24 tokens, read whole and as a stream, a token at a time, by
  another process.
- 256 rollouts at once, 32 genomes x 8 questions: answers a second by two workers that have 128
  rows each, relative to the same questions as single-turn Envs, by turns on one engine.
- 500 questions of one genome: how many answers by the program are those of the Env, token by token.

With names it trains agents of these frameworks on sums, three seeds each: greedy answers to sums
that are held out, before and after. `smolagents` sends a thousand tokens with each request, so its
sums are of small numbers and its generations few. Options of the run may follow.
"""

import asyncio
import contextlib
import json
import math
import os
import re
import secrets
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from typing_extensions import override

from benchmarks.harness import (
    CHAT_MODEL,
    Row,
    before_and_after,
    call,
    interleaved,
    mirrored_pairs,
    ratios,
    report,
    row,
)
from es_cookbook.checkpoints.model_files import model_directory
from es_cookbook.engines.base import Engine, Progress
from es_cookbook.engines.torch.engine import TorchEngineBuilder
from es_cookbook.evolution.genome import Genome
from es_cookbook.evolution.spaces.low_rank import LowRank
from es_cookbook.plugins.endpoint.app import serve
from es_cookbook.plugins.endpoint.endpoint import Endpoint, ServedModel
from es_cookbook.plugins.endpoint.limits import PendingAnswers
from es_cookbook.plugins.endpoint.requests import Draw
from es_cookbook.plugins.endpoint.translator import Translator
from es_cookbook.plugins.program.command import Command
from es_cookbook.plugins.program.env import Program, ProgramEnv, ProgramProblem
from es_cookbook.population.sampler import PopulationSampler
from es_cookbook.rl.data.rows import Row as DataRow
from es_cookbook.rl.data.task import TaskEnv
from es_cookbook.rl.messages.chat import KeptTurns
from es_cookbook.rl.problem_env import ProblemGroupBuilder
from es_cookbook.rl.prompts import render_prompt
from es_cookbook.rl.rewards.matching import Number
from es_cookbook.rl.types import (
    Action,
    EnvGroupBuilder,
    Observation,
    SamplingParams,
    Tokenizer,
    Trajectory,
)

REQUESTS, ROLLOUTS, GENOMES, COMPARED, TOKENS = 400, 256, 32, 500, 24
_ASK = """
import http.client, json, os, sys, threading, urllib.parse

def ask(url, key, text, connection=None, **more):
    at = urllib.parse.urlsplit(url)
    connection = connection or http.client.HTTPConnection(at.hostname, at.port)
    body = json.dumps({"model": "any", "messages": [{"role": "user", "content": text}], **more})
    headers = {"Authorization": "Bearer " + key}
    connection.request("POST", at.path + "/chat/completions", body, headers)
    found = connection.getresponse().read()
    return found if more else json.loads(found)["choices"][0]["message"]["content"]
"""
_MANY = """
url, key, text, count, stream = sys.argv[1:]
at = urllib.parse.urlsplit(url)
connection = http.client.HTTPConnection(at.hostname, at.port)
more = {"stream": True} if stream == "True" else {}
for _ in range(int(count)):
    ask(url, key, text, connection, **more)
"""
_WORKER = """
def work(task):
    text = ask(task["base_url"], task["api_key"], task["row"]["question"])
    sys.stdout.write(json.dumps({"id": task["id"], "answer": text}) + "\\n")
    sys.stdout.flush()

for line in sys.stdin:
    threading.Thread(target=work, args=(json.loads(line),)).start()
"""

_RECIPES = Path(__file__).parents[1] / "recipes"


class Agent(NamedTuple):
    """An agent and its training.

    Attributes:
        command: the agent's command, in its folder.
        question: question of a row about two numbers.
        numbers: ranges of the two numbers.
        metric: share of held-out rows that is right.
        options: options of the run, after those that all have.
    """

    command: str
    question: str = "What is {a} + {b}? Answer briefly."
    numbers: tuple[range, range] = (range(10, 99), range(10, 93))
    metric: str = "test/reward/mean"
    options: Sequence[str] = ()


AGENTS = {
    "pydantic_ai": Agent(f"{sys.executable} {_RECIPES / 'pydantic_agent.py'}"),
    "javascript": Agent("node agent.mjs"),
    "smolagents": Agent(
        f"{sys.executable} {_RECIPES / 'smolagents_agent.py'}",
        "What is {a} + {b}?",
        (range(1, 21), range(1, 10)),
        "test/env/all/right",
        (
            f"reward={Path(__file__)}:near",
            *("batch=8", "num_generations=3", "eval_every=3", "optimizer.sigma=0.004"),
            *("dataset.num_test=80", "dataset.at_once=256", "dataset.rows_at_once=128"),
            "sampling.max_tokens=32",
        ),
    ),
}
_NPM = Path(__file__).parents[1] / "build" / "npm" / "node_modules"
"""Directory of the package from `npm install --prefix build/npm openai`."""


class _AtOnce(Endpoint, ServedModel):
    """Gives the same answer to all requests, token by token to those that stream."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.translator, self.kept = Translator(tokenizer, 2048), KeptTurns()
        self.pending = PendingAnswers()
        tokens_T = tuple(tokenizer.encode("one two three " * TOKENS)[:TOKENS])
        self._action = Action(tokens_T, str(tokenizer.decode(list(tokens_T))), "stop")

    @override
    def check(self, key: str) -> None:
        """Accept any key."""

    @override
    def names(self, key: str) -> Sequence[str]:
        return ["any"]

    @override
    def model(self, key: str, name: str) -> ServedModel:
        return self

    @override
    async def sample(
        self, observation: Observation, draw: Draw, number: int, progress: Progress
    ) -> Action:
        for length in range(1, len(self._action.tokens_T)) if progress.follows else ():
            progress.sampled(self._action.tokens_T[:length])
            await asyncio.sleep(0)
        return self._action


def question(number: int, of: Agent = AGENTS["javascript"]) -> DataRow:
    first, second = of.numbers
    a, b = first[number % len(first)], second[number * 7 % len(second)]
    fields = {"question": of.question.format(a=a, b=b), "answer": a + b}
    return DataRow(f"question {number}", fields)


def near(text: str, row: Mapping[str, Any]) -> tuple[float, Mapping[str, float]]:
    """Return half a reward for a right answer, the rest for a close number and plain words."""
    numbers = re.findall(r"\d+", text)
    off = abs(int(numbers[-1][:9]) - row["answer"]) if numbers else math.inf
    plain, right = "{" not in text, float(off == 0)
    return 0.5 * right + 0.3 * math.exp(-off / 10) + 0.2 * plain, {"right": right, "plain": plain}


async def per_request(tokenizer: Tokenizer, program: Path) -> list[Row]:
    """Measure processor seconds of this process, which does nothing but serve."""
    endpoint = _AtOnce(tokenizer)
    rows: list[Row] = []
    with socket.create_server(("127.0.0.1", 0)) as bound:
        serving = asyncio.create_task(serve(endpoint, bound, until_signal=False))
        url = f"http://127.0.0.1:{bound.getsockname()[1]}/v1"
        for stream, most in ((False, 2), (True, 4)):
            spent: list[float] = []
            for _ in range(6):
                text = str(question(1).fields["question"])
                words = (url, secrets.token_hex(8), text, str(REQUESTS), str(stream))
                began = time.process_time()
                asking = await asyncio.create_subprocess_exec(sys.executable, str(program), *words)
                assert await asking.wait() == 0
                spent.append((time.process_time() - began) / REQUESTS * 1e3)
            name = "streamed" if stream else "whole"
            rows.append(row(f"a request, {name}: processor time", spent[1:], "ms", at_most=most))
        serving.cancel()
        await asyncio.wait((serving,))
    return rows


def as_envs(tokenizer: Tokenizer, count: int) -> list[EnvGroupBuilder]:
    """Return questions as single-turn Envs."""
    found: list[EnvGroupBuilder] = []
    for number in range(count):
        asked = question(number)
        prompt_T = render_prompt(tokenizer, str(asked.fields["question"]), chat=True)
        make = partial(TaskEnv, Observation(prompt_T), Number(), asked, 1.0)
        found.append(ProblemGroupBuilder(make, asked.where))
    return found


def as_programs(tokenizer: Tokenizer, worker: Path, count: int) -> list[EnvGroupBuilder]:
    """Return questions as programs, for workers."""
    command = Command((sys.executable, "-I", "-S", str(worker)), ())
    program = Program(command, Number(), ROLLOUTS, ROLLOUTS // 2, 4, tokenizer)
    return [
        ProgramProblem(partial(ProgramEnv, program, asked), asked.where)
        for asked in map(question, range(count))
    ]


async def beside_envs(engine: Engine, worker: Path) -> list[Row]:
    """Measure rollouts by turns, and compare their answers."""
    tokenizer = engine.tokenizer
    sampler = PopulationSampler(engine, sampling=SamplingParams(max_tokens=TOKENS), run_seed=0)
    genomes = mirrored_pairs(GENOMES)
    loop = asyncio.get_running_loop()

    async def rollout(problems: Sequence[EnvGroupBuilder], of: Sequence[Genome]) -> list[Action]:
        groups = await sampler.rollout(0, problems, of)
        found: list[Action] = []
        for group in groups:
            for (trajectory,) in group.trajectories_G_K:
                assert isinstance(trajectory, Trajectory), trajectory
                found.append(trajectory.transitions[0].action)
        return found

    def timed(problems: Sequence[EnvGroupBuilder]) -> None:
        asyncio.run_coroutine_threadsafe(rollout(problems, genomes), loop).result()

    few = ROLLOUTS // GENOMES
    contest = {
        "env": partial(timed, as_envs(tokenizer, few)),
        "program": partial(timed, as_programs(tokenizer, worker, few)),
    }
    seconds = await asyncio.to_thread(interleaved, contest, repeats=5)
    relative = ratios(seconds["env"], seconds["program"])
    own = await rollout(as_envs(tokenizer, COMPARED), genomes[:1])
    asked = await rollout(as_programs(tokenizer, worker, COMPARED), genomes[:1])
    same = sum(mine == theirs for mine, theirs in zip(own, asked, strict=True))
    return [
        row("256 rollouts as Envs", seconds["env"], "s"),
        row("256 rollouts by workers: answers a second", relative, "x Env's", at_least=0.9),
        row("answers that are the Env's", [100 * same / COMPARED], "%", at_least=100),
    ]


def gains(name: str, seeds: Sequence[int] = (0, 1, 2), *options: str) -> list[Row]:
    """Train an agent from the command line; runs stay in `build/agents`."""
    agent = AGENTS[name]
    gained: list[float] = []
    after: list[float] = []
    folder = CHAT_MODEL.parents[1] / "agents"
    folder.mkdir(exist_ok=True)
    with contextlib.chdir(folder):
        shutil.copy(_RECIPES / "agent.mjs", "agent.mjs")
        if not Path("node_modules").is_symlink():
            Path("node_modules").symlink_to(_NPM)
        rows = [json.dumps(dict(question(number, agent).fields)) for number in range(1000)]
        Path(f"{name}.jsonl").write_text("\n".join(dict.fromkeys(rows)))
        for seed in seeds:
            log_path = Path(f"{name}-seed{seed}")
            call(
                "train",
                f"program={agent.command}",
                f"data={name}.jsonl",
                "reward=number",
                f"model_name={CHAT_MODEL}",
                f"log_path={log_path}",
                "behavior_if_log_dir_exists=resume",
                f"seed={seed}",
                "dataset.rows_at_once=64",
                "dataset.num_test=200",
                "batch=16",
                "optimizer.sigma=auto",
                "optimizer.learning_rate=auto",
                "optimizer.population_size=32",
                "num_generations=15",
                "eval_every=15",
                "sampling.max_tokens=24",
                *agent.options,
                *options,
            )
            first, last = before_and_after(log_path, agent.metric)
            gained.append(100 * (last - first))
            after.append(100 * last)
    return [
        row(f"{name}: held-out gain", gained, "points", at_least=10),
        row(f"{name}: held out, afterwards", after, "%"),
    ]


async def measured() -> list[Row]:
    """Measure all rows."""
    directory = model_directory(str(CHAT_MODEL))
    with tempfile.TemporaryDirectory() as folder:
        many, worker = Path(folder, "many.py"), Path(folder, "worker.py")
        many.write_text(_ASK + _MANY)
        worker.write_text(_ASK + _WORKER)
        builder = TorchEngineBuilder()
        engine = await builder(model_name=str(directory), search_space=LowRank())
        try:
            rows = await per_request(engine.tokenizer, many)
            return [*rows, *await beside_envs(engine, worker)]
        finally:
            await engine.close()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "2")
    if not CHAT_MODEL.is_file():
        sys.exit("benchmarks.agents needs the chat model: make chat-model")
    chosen = [word for word in sys.argv[1:] if "=" not in word]
    for each in chosen:
        report("agents", gains(each, (0, 1, 2), *sys.argv[1 + len(chosen) :]), each)
    if not chosen:
        report("agents", asyncio.run(measured()))
