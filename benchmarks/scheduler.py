"""What the sampler itself costs: microseconds a rollout on top of its engine and its Env.

An engine that answers at once and an Env that grades at once leave the scheduling: a task, a clock,
a request with its sampling seed, the checks of the Env contract, the records. It shares the
interpreter lock with the engine's threads, so 2,048 rollouts a generation must not cost a tenth of
the generation.

Then the same sampler at scale: a million rollouts on 1,024 simulated engines, a genome each, that
answer whatever has come in a few milliseconds later. All of it runs on one event loop, so this is
what bounds the size of a pool; and its memory must not grow from one generation to the next.

    python -m benchmarks.scheduler
"""

import asyncio
import dataclasses
import resource
import sys
import time
from collections.abc import Sequence

import anyio

from benchmarks.harness import interleaved, report, row
from es_cookbook.engines.base import SampleRequest
from es_cookbook.evolution.genome import Genome, Term
from es_cookbook.population.sampler import PopulationSampler
from es_cookbook.rl.rollouts import env_metrics, mean_rewards
from es_cookbook.rl.types import (
    Action,
    Env,
    EnvGroup,
    EnvGroupBuilder,
    Observation,
    SamplingParams,
    StepResult,
)
from es_cookbook.train.garbage import rare_garbage_collection
from tests.fakes import FakeEngine, FakePool

PROBLEMS, GENOMES = 32, 64
ENGINES, PROBLEMS_AT_SCALE, GENERATIONS = 1024, 64, 16
WARM_UP = 8
"""Generations until the interpreter has all the memory that it will need."""
LATENCY = 0.005
OBSERVATION = Observation(tuple(range(30)))
ACTION = Action(tuple(range(24)), "(1 + 2) * 3", "stop")


class InstantEngine(FakeEngine):
    async def sample(self, request: SampleRequest) -> Action:
        await asyncio.sleep(0)
        return ACTION


class SimulatedEngine(FakeEngine):
    """Answers all that has come, once every few milliseconds, and keeps nothing."""

    def __init__(self) -> None:
        super().__init__()
        self._waiting: list[asyncio.Future[Action]] = []

    async def load(self, genomes_G: Sequence[Genome]) -> None:
        await asyncio.sleep(0)

    async def sample(self, request: SampleRequest) -> Action:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Action] = loop.create_future()
        if not self._waiting:
            loop.call_later(LATENCY, self._answer_all)
        self._waiting.append(answer)
        return await answer

    def _answer_all(self) -> None:
        waiting, self._waiting = self._waiting, []
        for answer in waiting:
            answer.set_result(ACTION)


class InstantEnv(Env):
    async def initial_observation(self) -> Observation:
        return OBSERVATION

    async def step(self, action: Action) -> StepResult:
        return StepResult(1.0, done=True, metrics={"correct": 1.0, "format": 1.0})


@dataclasses.dataclass(frozen=True)
class InstantProblem(EnvGroupBuilder):
    async def make_envs(self, num_envs: int) -> EnvGroup:
        return EnvGroup([InstantEnv() for _ in range(num_envs)])


async def generation(sampler: PopulationSampler, number: int, problems: int, genomes: int) -> None:
    """A generation as the loop runs it."""
    genomes_G = [Genome((Term(seed, 1.0),)) for seed in range(genomes)]
    groups_P = await sampler.rollout(number, [InstantProblem()] * problems, genomes_G)
    mean_rewards(groups_P)
    env_metrics(groups_P)


async def scheduled() -> None:
    """A small population on one engine."""
    sampler = PopulationSampler(InstantEngine(), sampling=SamplingParams())
    await generation(sampler, 0, PROBLEMS, GENOMES)


async def bare() -> None:
    """The same calls of engine and Env, one after the other."""
    engine = InstantEngine()
    params = SamplingParams()
    for _ in range(PROBLEMS * GENOMES):
        env = InstantEnv()
        observation = await env.initial_observation()
        await env.step(await engine.sample(SampleRequest(0, observation, params)))


async def at_scale() -> tuple[list[float], float]:
    """Microseconds a rollout in each generation, and MB by which the peak of memory then grew."""
    pool = FakePool([SimulatedEngine() for _ in range(ENGINES)])
    sampler = PopulationSampler(pool, sampling=SamplingParams())
    microseconds: list[float] = []
    peaks: list[float] = []
    for number in range(GENERATIONS):
        began = time.perf_counter()
        await generation(sampler, number, PROBLEMS_AT_SCALE, ENGINES)
        took = time.perf_counter() - began
        microseconds.append(took / (PROBLEMS_AT_SCALE * ENGINES) * 1e6)
        peaks.append(peak_megabytes())
    return microseconds, peaks[-1] - peaks[WARM_UP - 1]


def peak_megabytes() -> float:
    """Most memory that this process has had."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6


def main() -> None:
    """Measure and report."""
    with rare_garbage_collection():  # As the loop does.
        times = interleaved(
            {"scheduled": lambda: anyio.run(scheduled), "bare": lambda: anyio.run(bare)}, repeats=15
        )
        microseconds, growth = anyio.run(at_scale)
    overheads = [
        (scheduled - bare) / (PROBLEMS * GENOMES) * 1e6
        for scheduled, bare in zip(times["scheduled"], times["bare"], strict=True)
    ]
    rollouts = PROBLEMS_AT_SCALE * ENGINES * GENERATIONS
    at = f"{ENGINES:,} engines, {rollouts:,} rollouts"
    report(
        "scheduler",
        [
            row("scheduling, a rollout", overheads, "µs", at_most=100),
            row(f"{at}: all of a rollout", microseconds, "µs", at_most=100),
            row(f"{at}: growth of memory after {WARM_UP} generations", [growth], "MB", at_most=2),
        ],
    )


if __name__ == "__main__":
    main()
