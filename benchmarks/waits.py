"""What tools that keep their Envs waiting cost the engine.

    python -m benchmarks.waits
    python -m benchmarks.waits --genomes 32 --repeats 3

One generation of 64 rank-1 genomes × 16 Countdown problems × 4 turns of 16 tokens, the bundled
model without its end-of-sequence token, on the torch engine; by turns:

- with tools that answer at once;
- with tools that sleep between two turns, 0.1 to 10 s, from a Pareto distribution (median 0.3 s).

A rollout that waits for its tool has no request in the engine, and so holds no slot there. Compared
is how busy the engine is while enough rollouts can be run: processor seconds a second while at
least an eighth of all have a request in the engine. Tokens a second are given beside; they are
fewer where fewer requests share a step. The rest of the time the engine waits for tools, which
nothing can hide, as the seconds of whole generations show.
"""

import argparse
import asyncio
import dataclasses
import random
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from benchmarks.harness import mirrored_pairs, ratios, report, row
from benchmarks.sampling import endless_model, first_prompt
from es_cookbook.common.seeds import derive_seed
from es_cookbook.engines.torch.engine import TorchEngineBuilder
from es_cookbook.evolution.spaces.low_rank import LowRank
from es_cookbook.population.sampler import PopulationSampler
from es_cookbook.recipes.countdown.dataset import CountdownDatasetBuilder
from es_cookbook.rl.types import (
    Action,
    Env,
    EnvGroup,
    EnvGroupBuilder,
    Observation,
    SamplingParams,
    StepResult,
)

PROBLEMS, TURNS, WRITTEN, TOLD = 16, 4, 16, 16
SHORTEST, LONGEST, TAIL = 0.1, 10.0, 0.63
"""Sleeps in seconds, and their tail: at log 2 / log 3 the median is three times the shortest."""
ENOUGH = 8
"""Rollouts suffice while one in this many waits for the engine."""


class Log:
    """Requests in the engine, tokens sampled and processor seconds, over time."""

    def __init__(self) -> None:
        self.num_requests = 0
        self.num_tokens = 0
        self._times = [(time.perf_counter(), time.process_time(), 0, 0)]

    def change(self, requests: int, tokens: int = 0) -> None:
        """Record a change in the engine's requests, and newly sampled tokens."""
        self.num_requests += requests
        self.num_tokens += tokens
        now = time.perf_counter(), time.process_time()
        self._times.append((*now, self.num_requests, self.num_tokens))

    def rates(self, enough: int) -> tuple[float, float]:
        """Return rates over the time in which there are at least so many requests.

        Processor seconds and tokens, per second.
        """
        spans = [
            [after - before for before, after in zip(first, then, strict=True)]
            for first, then in pairwise(self._times)
            if first[2] >= enough
        ]
        seconds, processor, _, tokens = (sum(column) for column in zip(*spans, strict=True))
        return processor / seconds, tokens / seconds


class ToolEnv(Env):
    """Asks a tool after every turn but the last."""

    def __init__(self, prompt_T: tuple[int, ...], log: Log, sleeps: Sequence[float]) -> None:
        self._prompt_T = prompt_T
        self._log = log
        self._sleeps = list(sleeps)

    async def initial_observation(self) -> Observation:
        """Return the prompt."""
        return Observation(self._prompt_T)

    async def act(self, observation: Observation) -> Action:
        """Sample an action, and log it."""
        self._log.change(requests=1)
        action = await self.policy.sample(observation)
        self._log.change(requests=-1, tokens=len(action.tokens_T))
        return action

    async def step(self, action: Action) -> StepResult:
        """Wait for the tool."""
        if not self._sleeps:
            return StepResult(0.0, done=True)
        await asyncio.sleep(self._sleeps.pop())
        self._prompt_T += action.tokens_T + (self._prompt_T * TOLD)[:TOLD]
        observation = Observation(self._prompt_T, is_last=not self._sleeps)
        return StepResult(0.0, done=False, next_observation=observation)


@dataclasses.dataclass(frozen=True)
class ToolProblem(EnvGroupBuilder):
    """One prompt; `slow` tools sleep."""

    prompt_T: tuple[int, ...]
    number: int
    log: Log
    slow: bool

    async def make_envs(self, num_envs: int) -> EnvGroup:
        """Return Envs, each with different sleeps."""
        rng = random.Random(derive_seed(0, "sleeps of tools", self.number))
        sleeps = [
            [min(SHORTEST * rng.random() ** (-1 / TAIL), LONGEST) for _ in range(TURNS - 1)]
            for _ in range(num_envs)
        ]
        return EnvGroup(
            [ToolEnv(self.prompt_T, self.log, s if self.slow else [0] * len(s)) for s in sleeps]
        )


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--genomes", type=int, default=64, help="genomes of the population")
    parser.add_argument("--repeats", type=int, default=5, help="generations of each kind")
    options = parser.parse_args()
    asyncio.run(measure(options.genomes, options.repeats))


async def measure(num_genomes: int, repeats: int) -> None:
    """Run generations of both kinds by turns, and report."""
    with tempfile.TemporaryDirectory() as directory:
        path = str(endless_model(Path(directory)))
        engine = await TorchEngineBuilder()(model_name=path, search_space=LowRank(rank=1))
    datasets = await CountdownDatasetBuilder(problems_per_generation=PROBLEMS)(engine.tokenizer)
    prompts = [await first_prompt(problem) for problem in datasets.train.get_batch(0)]
    genomes_G = mirrored_pairs(num_genomes)
    sampler = PopulationSampler(engine, sampling=SamplingParams(max_tokens=WRITTEN))
    busy: dict[bool, list[float]] = {False: [], True: []}
    rates: dict[bool, list[float]] = {False: [], True: []}
    whole: dict[bool, list[float]] = {False: [], True: []}
    for repeat in range(-1, repeats):
        for slow in rates:
            log, began = Log(), time.perf_counter()
            problems = [ToolProblem(p, i, log, slow) for i, p in enumerate(prompts)]
            await sampler.rollout(0, problems, genomes_G)
            if repeat >= 0:  # the first round is a warm-up
                processor, tokens = log.rates(num_genomes * PROBLEMS // ENOUGH)
                busy[slow].append(processor)
                rates[slow].append(tokens)
                whole[slow].append(time.perf_counter() - began)
    await engine.close()
    report(
        "waits",
        [
            row("busy, tools that answer at once", busy[False], "processor s/s"),
            row("busy, tools that sleep", busy[True], "processor s/s"),
            row("busy, sleeping / at once", ratios(busy[True], busy[False]), "x", at_least=0.9),
            row("tools that answer at once, while enough rollouts run", rates[False], "tokens/s"),
            row("tools that sleep, while enough rollouts run", rates[True], "tokens/s"),
            row("generation, tools that answer at once", whole[False], "s"),
            row("generation, tools that sleep 0.1 to 10 s three times", whole[True], "s"),
        ],
    )


if __name__ == "__main__":
    main()
