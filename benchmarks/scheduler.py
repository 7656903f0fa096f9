"""Overhead of the sampler: microseconds per rollout on top of its engine and its Env.

An engine that answers at once and an Env that grades at once leave the scheduling: a task, a clock,
a request with its sampling seed, the checks of the Env contract, the records. It shares the
interpreter lock with the engine's threads, so 2,048 rollouts a generation must not cost a tenth of
the generation.

Then the same sampler at scale: a million rollouts on 1,024 simulated engines, a genome each, that
answer all requests so far a few milliseconds later. All of it runs on one event loop, so this is
what bounds the size of a pool; and its memory must not grow from one generation to the next.
Seconds are the processor's, so that other programs count less.

Last, how busy engines of unequal speed are: 8 and 64 of them, the quickest three times as quick as
the slowest. When each answers is measured, not invented: the torch engine runs blocks of 1 to 128
genomes of the bundled model on one core, with continuous batching, and the simulated engines repeat
its times: a thousand times as slow, as those of a larger model, and as they are, where the driver
is what limits. Beside it, by arithmetic, what equal shares would give: everybody waits for the
slowest. And the bytes that 64 engines are sent and send. Time is virtual: waiting is skipped, the
driver's own work is the processor's time, so little depends on what else the machine does.

    python -m benchmarks.scheduler
"""

import asyncio
import bisect
import dataclasses
import heapq
import math
import resource
import selectors
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import anyio
import numpy as np

from benchmarks.harness import Row, interleaved, report, row
from es_cookbook.engines.base import SampleRequest
from es_cookbook.engines.torch.engine import TorchEngineBuilder
from es_cookbook.engines.wire import encode_answers, encode_genomes, encode_requests
from es_cookbook.evolution.genome import Genome, Term
from es_cookbook.evolution.spaces.low_rank import LowRank
from es_cookbook.population.sampler import PopulationSampler, rare_garbage_collection
from es_cookbook.population.scheduling import BlockScheduler
from es_cookbook.recipes.countdown.dataset import CountdownDatasetBuilder
from es_cookbook.recipes.countdown.train_cli import BUNDLED_MODEL
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
from tests.fakes import FakeEngine, FakePool

PROBLEMS, GENOMES = 32, 64
ENGINES, PROBLEMS_AT_SCALE, GENERATIONS = 1024, 64, 16
WARM_UP = 8
"""Generations until the interpreter has all the memory that it will need."""
UNEQUAL_GENERATIONS = 5
LATENCY = 0.005
SERVED, SIZES = 8, (1, 2, 4, 8, 16, 32, 64, 128)
"""Problems, and genomes of a block, of the engine whose times are measured."""
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


class VirtualLoop(asyncio.SelectorEventLoop):
    """Skips all waiting; else its time is what this process has used of the processor."""

    def __init__(self) -> None:
        self._skipped = 0.0
        super().__init__(_Impatient(self))

    def time(self) -> float:
        """Return seconds."""
        return self._skipped + time.process_time()

    def skip(self, seconds: float) -> None:
        """Skip seconds of waiting."""
        self._skipped += seconds


class _Impatient(selectors.SelectSelector):
    """Polls without waiting."""

    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[Any]:
        ready = super().select(0)
        if not ready and timeout:
            self._loop.skip(timeout)
        return ready


class Service:
    """Times at which a real engine answers a block of genomes, each at the same problems.

    Attributes:
        answers: answers of the largest block.
    """

    def __init__(self, answers: Sequence[Action], seconds: dict[int, list[list[float]]]) -> None:
        self.answers = answers
        self._seconds_P_G = seconds
        self._sizes = sorted(seconds)
        self._all = [max(map(max, seconds[size])) for size in self._sizes]

    def takes(self, genomes: int) -> float:
        """Return seconds of a block, between those measured in proportion."""
        return float(np.interp(genomes, self._sizes, self._all))

    def answered(self, genomes: int, problem: int, genome: int) -> float:
        """Return seconds after which one genome of a block has answered one problem."""
        i = min(bisect.bisect_left(self._sizes, genomes), len(self._sizes) - 1)
        return self._seconds_P_G[self._sizes[i]][problem][genome] * (
            self.takes(genomes) / self._all[i]
        )


async def measured_service() -> Service:
    """Measure the torch engine and the bundled model on one core, in processor seconds."""
    engine = await TorchEngineBuilder(num_lanes=1)(
        model_name=str(BUNDLED_MODEL), search_space=LowRank(rank=1)
    )
    datasets = await CountdownDatasetBuilder(problems_per_generation=SERVED)(engine.tokenizer)
    groups = [await builder.make_envs(1) for builder in datasets.train.get_batch(0)]
    prompts = [await group.envs[0].initial_observation() for group in groups]
    params = SamplingParams(max_tokens=24)
    answers: list[Action] = []
    seconds: dict[int, list[list[float]]] = {}
    for size in SIZES:
        seconds[size] = [[math.inf] * size for _ in prompts]
        for _ in range(3):  # The least of three: the first compiles.
            await engine.load([Genome((Term(g // 2, 0.005 * (-1) ** g),)) for g in range(size)])
            began = time.process_time()

            async def ask(p: int, g: int, began: float = began, size: int = size) -> Action:
                answer = await engine.sample(SampleRequest(g, prompts[p], params, p))
                took = time.process_time() - began
                seconds[size][p][g] = min(seconds[size][p][g], took)
                return answer

            asked = [ask(p, g) for p in range(len(prompts)) for g in range(size)]
            answers = await asyncio.gather(*asked)
    await engine.close()
    return Service(answers, seconds)


class ServingEngine(FakeEngine):
    """Answers when a real engine did, that much faster, and all that is due at once.

    Attributes:
        busy: seconds in which it did.
        blocks: number of its blocks.
    """

    def __init__(self, number: int, speed: float, service: Service) -> None:
        super().__init__(max(SIZES))
        self.number = number
        self.speed = speed
        self.service = service
        self.busy = 0.0
        self.blocks = 0
        self._waiting: list[tuple[float, int, asyncio.Future[Action]]] = []
        self._asked = self._size = 0
        self._began = 0.0

    @property
    def label(self) -> str:
        """A unique label: engines are told apart by it."""
        return f"engine {self.number}"

    async def load(self, genomes_G: Sequence[Genome]) -> None:
        """Begin a block."""
        await asyncio.sleep(0)
        self._asked, self._size = 0, len(genomes_G)
        self._began = asyncio.get_running_loop().time()
        self.busy += self.service.takes(self._size) / self.speed
        self.blocks += 1

    async def sample(self, request: SampleRequest) -> Action:
        """Answer when due, plus a few milliseconds for the message."""
        loop = asyncio.get_running_loop()
        problem, genome = divmod(self._asked, self._size)
        due = self._began + self.service.answered(self._size, problem, genome) / self.speed
        answer: asyncio.Future[Action] = loop.create_future()
        if not self._waiting:
            loop.call_later(LATENCY, self._deliver)
        heapq.heappush(self._waiting, (due, self._asked, answer))
        self._asked += 1
        return await answer

    def _deliver(self) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        while self._waiting and self._waiting[0][0] <= now:
            heapq.heappop(self._waiting)[2].set_result(ACTION)
        if self._waiting:
            loop.call_at(max(self._waiting[0][0], now + LATENCY), self._deliver)


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
    """Run a generation as the loop runs it."""
    genomes_G = [Genome((Term(seed, 1.0),)) for seed in range(genomes)]
    groups_P = await sampler.rollout(number, [InstantProblem()] * problems, genomes_G)
    mean_rewards(groups_P)
    env_metrics(groups_P)


async def scheduled() -> None:
    """Run a small population on one engine."""
    sampler = PopulationSampler(InstantEngine(), sampling=SamplingParams())
    await generation(sampler, 0, PROBLEMS, GENOMES)


async def bare() -> None:
    """Run the same calls of engine and Env, one after the other."""
    engine = InstantEngine()
    params = SamplingParams()
    for _ in range(PROBLEMS * GENOMES):
        env = InstantEnv()
        observation = await env.initial_observation()
        await env.step(await engine.sample(SampleRequest(0, observation, params)))


async def at_scale() -> tuple[list[float], float]:
    """Return microseconds a rollout in each generation, and MB by which the peak then grew."""
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


@dataclasses.dataclass
class Busy:
    """Utilisation in one generation: shares of the time, and blocks of an engine.

    Attributes:
        engines: share of their time in which engines work.
        best: time of the generation if all worked throughout on the largest blocks, over its time.
        driver: share of its core.
        blocks: number of blocks of an engine.
    """

    engines: float
    best: float
    driver: float
    blocks: float


async def unequal(engines: int, genomes: int, slowness: float, service: Service) -> list[Busy]:
    """Return utilisation of engines and of this process's core, a generation each."""
    speeds = [(1 + 2 * e / (engines - 1)) / slowness for e in range(engines)]
    hosts_E = [ServingEngine(e, speed, service) for e, speed in enumerate(speeds)]
    sampler = PopulationSampler(FakePool(hosts_E), sampling=SamplingParams())
    clock = asyncio.get_running_loop().time
    sampler._scheduler = BlockScheduler(clock)  # pyright: ignore[reportPrivateUsage]
    found: list[Busy] = []
    for number in range(UNEQUAL_GENERATIONS):
        for host in hosts_E:
            host.busy, host.blocks = 0.0, 0
        began, began_cpu = clock(), time.process_time()
        await generation(sampler, number, SERVED, genomes)
        took, cpu = clock() - began, time.process_time() - began_cpu
        busy = sum(host.busy for host in hosts_E) / took / engines
        largest = max(SIZES)
        best = genomes * service.takes(largest) / largest / sum(speeds) / took
        found.append(Busy(busy, best, cpu / took, sum(host.blocks for host in hosts_E) / engines))
    return found


def equal_shares(engines: int) -> float:
    """Return utilisation if each of such engines runs as many genomes and waits for the slowest."""
    return sum(1 / (1 + 2 * e / (engines - 1)) for e in range(engines)) / engines


def unequal_rows() -> list[Row]:
    """Measure engines of unequal speed, few and many, with a small model and with a larger one."""
    service = anyio.run(measured_service)
    rows: list[Row] = [
        row(f"a block of {size} genomes, a genome", [service.takes(size) / size * 1e3], "ms")
        for size in (1, 8, 64, 128)
    ]
    for engines, genomes, slowness in ((8, 512, 1000), (64, 4096, 1000), (64, 4096, 1)):
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            found = runner.run(unequal(engines, genomes, slowness, service))
        later = found[1:]
        name = f"{engines} unequal engines, {genomes:,} genomes"
        if slowness > 1:
            name += f", {slowness:,} times as slow"
        goal = None if slowness == 1 and engines == 64 else 0.85
        rows += [
            row(f"{name}: busy, equal shares", [equal_shares(engines)], ""),
            row(f"{name}: busy, first generation", [found[0].engines], ""),
            row(f"{name}: busy, later", [each.engines for each in later], "", at_least=goal),
            row(f"{name}: best time / time", [each.best for each in later], ""),
            row(f"{name}: blocks of an engine", [each.blocks for each in later], ""),
            row(f"{name}: driver's core", [each.driver for each in later], "s/s"),
        ]
    genomes_G = [Genome((Term(seed, 1.0),)) for seed in range(4096)]
    sent = sum(len(encode_genomes(genomes_G[e::64])) for e in range(64)) / 4096
    requests = [
        SampleRequest(g, OBSERVATION, SamplingParams(), p) for p in range(SERVED) for g in range(64)
    ]
    asked = sum(map(len, encode_requests(requests)[0])) / 64
    answers = len(encode_answers(enumerate(service.answers))) / max(SIZES)
    name = "64 engines, 4,096 genomes"
    return [
        *rows,
        row(f"{name}: genomes", [sent], "bytes/genome"),
        row(f"{name}: questions", [asked], "bytes/genome"),
        row(f"{name}: answers", [answers], "bytes/genome"),
    ]


def processor_seconds(run: Callable[[], Awaitable[None]]) -> float:
    """Return processor seconds of one run."""
    began = time.process_time()
    anyio.run(run)
    return time.process_time() - began


def peak_megabytes() -> float:
    """Return this process's peak memory."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6


def main() -> None:
    """Measure and report."""
    with rare_garbage_collection():  # As the loop does.
        times: dict[str, list[float]] = {"scheduled": [], "bare": []}
        interleaved(
            {
                "scheduled": lambda: times["scheduled"].append(processor_seconds(scheduled)),
                "bare": lambda: times["bare"].append(processor_seconds(bare)),
            },
            repeats=15,
        )
        microseconds, growth = anyio.run(at_scale)
    overheads = [  # The first pair warmed up.
        (scheduled - bare) / (PROBLEMS * GENOMES) * 1e6
        for scheduled, bare in zip(times["scheduled"][1:], times["bare"][1:], strict=True)
    ]
    rollouts = PROBLEMS_AT_SCALE * ENGINES * GENERATIONS
    at = f"{ENGINES:,} engines, {rollouts:,} rollouts"
    report(
        "scheduler",
        [
            row("scheduling, a rollout", overheads, "µs", at_most=30),
            row(f"{at}: all of a rollout", microseconds, "µs", at_most=30),
            row(f"{at}: growth of memory after {WARM_UP} generations", [growth], "MB", at_most=2),
            *unequal_rows(),
        ],
    )


if __name__ == "__main__":
    main()
