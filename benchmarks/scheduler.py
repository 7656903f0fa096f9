"""What the sampler itself costs: microseconds a rollout on top of its engine and its Env.

An engine that answers at once and an Env that grades at once leave the scheduling: a task, a clock,
a request with its sampling seed, the checks of the Env contract, the records. It shares the
interpreter lock with the engine's threads, so 2,048 rollouts a generation must not cost a tenth of
the generation.

Then the same sampler at scale: a million rollouts on 1,024 simulated engines, a genome each, that
answer whatever has come in a few milliseconds later. All of it runs on one event loop, so this is
what bounds the size of a pool; and its memory must not grow from one generation to the next.
Seconds are the processor's, so that other programs count less.

Last, how busy engines of unequal speed are: 8 and 64 of them, the quickest three times as quick as
the slowest, each answering rollouts one after the other. Beside it, by arithmetic, what equal
shares would give: everybody waits for the slowest. And the bytes of genomes that 64 engines are
sent.

    python -m benchmarks.scheduler
"""

import asyncio
import dataclasses
import resource
import sys
import time
from collections.abc import Sequence

import anyio

from benchmarks.harness import Row, interleaved, report, row
from es_cookbook.engines.base import SampleRequest
from es_cookbook.engines.wire import encode_genomes
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
TICK = 0.05
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


class RatedEngine(SimulatedEngine):
    """Answers so many rollouts a second, one after the other.

    Attributes:
        busy: seconds in which it did.
    """

    def __init__(self, number: int, rate: float) -> None:
        super().__init__()
        self.number = number
        self.rate = rate
        self.busy = 0.0
        self._asked_at = 0.0

    @property
    def label(self) -> str:
        """Its own: engines are told apart by it."""
        return f"engine {self.number}"

    async def sample(self, request: SampleRequest) -> Action:
        """Behind whatever was asked before."""
        loop = asyncio.get_running_loop()
        if not self._waiting:
            self._asked_at = loop.time()
            loop.call_later(TICK, self._answer_all)
        self._waiting.append(loop.create_future())
        return await self._waiting[-1]

    def _answer_all(self) -> None:
        loop = asyncio.get_running_loop()
        due = int((loop.time() - self._asked_at) * self.rate)
        answered, self._waiting = self._waiting[:due], self._waiting[due:]
        self._asked_at += due / self.rate
        self.busy += len(answered) / self.rate
        for answer in answered:
            answer.set_result(ACTION)
        if self._waiting:
            loop.call_later(TICK, self._answer_all)


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
        began = time.process_time()
        await generation(sampler, number, PROBLEMS_AT_SCALE, ENGINES)
        took = time.process_time() - began
        microseconds.append(took / (PROBLEMS_AT_SCALE * ENGINES) * 1e6)
        peaks.append(peak_megabytes())
    return microseconds, peaks[-1] - peaks[WARM_UP - 1]


async def unequal(engines: int, genomes: int, slowest: float) -> list[tuple[float, float]]:
    """Utilisation of engines and of this process's core, a generation each."""
    rates = [slowest * (1 + 2 * e / (engines - 1)) for e in range(engines)]
    hosts_E = [RatedEngine(e, rate) for e, rate in enumerate(rates)]
    sampler = PopulationSampler(FakePool(hosts_E), sampling=SamplingParams())
    found: list[tuple[float, float]] = []
    for number in range(5):
        busy = sum(host.busy for host in hosts_E)
        began, began_cpu = time.perf_counter(), time.process_time()
        await generation(sampler, number, 4, genomes)
        took, cpu = time.perf_counter() - began, time.process_time() - began_cpu
        found.append(((sum(h.busy for h in hosts_E) - busy) / took / engines, cpu / took))
    return found


def equal_shares(engines: int) -> float:
    """Utilisation if each of such engines runs as many genomes: all wait for the slowest."""
    return sum(1 / (1 + 2 * e / (engines - 1)) for e in range(engines)) / engines


def unequal_rows() -> list[Row]:
    """Engines of unequal speed, few and many."""
    rows: list[Row] = []
    for engines, genomes in ((8, 256), (64, 4096)):
        found = anyio.run(unequal, engines, genomes, 20.0)
        name = f"{engines} unequal engines, {genomes:,} genomes"
        busy = [each for each, _ in found]
        rows += [
            row(f"{name}: busy, equal shares", [equal_shares(engines)], ""),
            row(f"{name}: busy, first generation", busy[:1], ""),
            row(f"{name}: busy, later", busy[1:], "", at_least=0.85),
            row(f"{name}: driver's core", [cpu for _, cpu in found], "s/s"),
        ]
    genomes_G = [Genome((Term(seed, 1.0),)) for seed in range(4096)]
    sent = sum(len(encode_genomes(genomes_G[e::64])) for e in range(64))
    return [
        *rows,
        row("64 engines, 4,096 genomes: bytes of genomes", [sent / 4096], "bytes/genome"),
    ]


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
            *unequal_rows(),
        ],
    )


if __name__ == "__main__":
    main()
