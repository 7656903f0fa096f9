"""What it costs when an engine is far away: over 10 Mbit/s with 100 ms there and back.

    python -m benchmarks.slow_link

The driver and Ray's head on one host, the only engine of the pool on another, and a link between
them that carries every byte (`tests.links`: network namespaces of Linux, as root or where users may
make them). Generations by turns over the quick link and over the slow one: 64 genomes × 32 problems
of Countdown, and a step.

Bytes with the bundled model and the torch engine. They are of IP packets, as they cross the link,
with the envelopes of Ray, gRPC and TCP in them; what Ray says to itself all the time is measured
apart and left out. Beside them what the messages themselves have (`engines.wire`).

Time with an engine that takes no processor's time, because both hosts share this machine's: it
answers evenly over a second. The design predicts that three answers are waited for, one after the
other (genomes are loaded, the last rollouts sampled, the step taken), and that answers under way
are fetched once a round trip, so the last of them waits for half of one more: 3.5 round trips.
"""

import asyncio
import dataclasses
import os
import sys
import time
from collections.abc import Sequence
from typing import TypeAlias

import chz
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from benchmarks.harness import Row, ratios, report, row
from es_cookbook.engines.base import Engine, EngineBuilder, SampleRequest
from es_cookbook.engines.ray.pool import RayPool, RayPoolBuilder
from es_cookbook.engines.torch.engine import TorchEngineBuilder
from es_cookbook.engines.wire import encode_answers
from es_cookbook.evolution.genome import Genome, Step, Term
from es_cookbook.evolution.spaces.base import SearchSpaceBuilder
from es_cookbook.evolution.spaces.low_rank import LowRank
from es_cookbook.population.sampler import PopulationSampler, rare_garbage_collection
from es_cookbook.recipes.countdown.dataset import CountdownDatasetBuilder
from es_cookbook.recipes.countdown.train_cli import BUNDLED_MODEL
from es_cookbook.rl.types import (
    Action,
    RLDataset,
    SamplingParams,
    Trajectory,
    TrajectoryGroup,
)
from tests.fakes import FakeEngine
from tests.links import Link, inside
from tests.ray_nodes import ADDRESS, start_head, start_there

GENOMES, PROBLEMS, TOKENS = 64, 32, 24
BITS_PER_SECOND, ROUND_TRIP = 10e6, 0.1
WARM_UP, REPEATS = 1, 9
IDLE_SECONDS = 10.0
SECONDS = 1.0
"""In which the patient engine answers a generation."""


@chz.chz
class PatientEngineBuilder(EngineBuilder):
    """Builds a `PatientEngine`."""

    async def __call__(self, *, model_name: str, search_space: SearchSpaceBuilder) -> Engine:
        tokenizer = AutoTokenizer.from_pretrained(model_name)
        return PatientEngine(tokenizer)


class PatientEngine(FakeEngine):
    """Answers one request after the other, all of a generation in `SECONDS`."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        super().__init__()
        self.traits = dataclasses.replace(self.traits, context_length=256)
        self.tokenizer = tokenizer
        self._asked = 0

    async def load(self, genomes_G: Sequence[Genome]) -> None:
        self._asked = 0

    async def sample(self, request: SampleRequest) -> Action:
        self._asked += 1
        await asyncio.sleep(SECONDS * self._asked / (GENOMES * PROBLEMS))
        return Action(tuple(range(TOKENS)), "(1 + 2) * 3", "stop")


Took: TypeAlias = tuple[float, float, float]
"""Seconds of a generation, bytes to the engine, bytes back."""


class Generations:
    """One after the other; how long each took, and what crossed the link."""

    def __init__(self, pool: RayPool, link: Link, dataset: RLDataset) -> None:
        self._pool = pool
        self._link = link
        self._dataset = dataset
        self._sampler = PopulationSampler(pool, sampling=SamplingParams(max_tokens=TOKENS))
        self._number = 0
        self.groups_P: list[TrajectoryGroup] = []

    async def run(self) -> Took:
        """Seconds, bytes to the engine, bytes back."""
        number, self._number = self._number, self._number + 1
        seeds = range(1000 * number, 1000 * number + GENOMES // 2)
        genomes_G = [Genome((Term(seed, sign * 0.005),)) for seed in seeds for sign in (1, -1)]
        began, (there, back) = time.perf_counter(), self._link.sent
        self.groups_P = await self._sampler.rollout(
            number, self._dataset.get_batch(number), genomes_G
        )
        await self._pool.apply(Step(tuple(Term(seed, 1e-4) for seed in seeds)))
        sent = self._link.sent
        return time.perf_counter() - began, sent[0] - there, sent[1] - back

    def answer_bytes(self) -> int:
        """Of the last generation's answers, as one message."""
        trajectories = [
            trajectory
            for group in self.groups_P
            for trajectories_K in group.trajectories_G_K
            for trajectory in trajectories_K
        ]
        actions = [t.transitions[0].action for t in trajectories if isinstance(t, Trajectory)]
        return len(encode_answers(enumerate(actions)))


async def started(engine: EngineBuilder, link: Link) -> tuple[RayPool, Generations]:
    """A pool of one such engine, and what runs its generations."""
    pool = await RayPoolBuilder(num_engines=1, num_cpus=1, address=ADDRESS, engine=engine)(
        model_name=str(BUNDLED_MODEL), search_space=LowRank(rank=1)
    )
    datasets = await CountdownDatasetBuilder(problems_per_generation=PROBLEMS)(pool.tokenizer)
    return pool, Generations(pool, link, datasets.train)


async def quick_and_slow(generations: Generations, link: Link) -> tuple[list[Took], list[Took]]:
    """Generations over the quick link and over the slow one, by turns."""
    quick: list[Took] = []
    slow: list[Took] = []
    for _ in range(WARM_UP + REPEATS):
        link.set()
        quick.append(await generations.run())
        link.set(BITS_PER_SECOND, ROUND_TRIP)
        slow.append(await generations.run())
    link.set()
    return quick[WARM_UP:], slow[WARM_UP:]


def seconds(took: Sequence[Took]) -> list[float]:
    """Of each generation."""
    return [each[0] for each in took]


async def bytes_rows(link: Link) -> list[Row]:
    """With a model: what crosses the link, and what the messages have."""
    pool, generations = await started(TorchEngineBuilder(num_lanes=1), link)
    before, stats = link.sent, pool.stats()
    await asyncio.sleep(IDLE_SECONDS)
    idle = [(now - then) / IDLE_SECONDS for now, then in zip(link.sent, before, strict=True)]
    quick, slow = await quick_and_slow(generations, link)
    sent, questions = (
        (pool.stats()[key] - stats[key]) / (2 * (WARM_UP + REPEATS))
        for key in ("sent_bytes", "question_bytes")
    )
    answers = generations.answer_bytes()
    await pool.close()
    there = [there - idle[0] * took for took, there, _ in (*quick, *slow)]
    back = [back - idle[1] * took for took, _, back in (*quick, *slow)]
    slowdowns = ratios(seconds(slow), seconds(quick))
    over = [(t + b) / (sent + answers) for t, b in zip(there, back, strict=True)]
    return [
        row("torch: time, 10 Mbit/s and 100 ms / quick", slowdowns, "x"),
        row("to the engine, a generation", there, "bytes"),
        row("of which messages", [sent], "bytes"),
        row("of which genomes and step, a genome", [(sent - questions) / GENOMES], "bytes"),
        row("from the engine, a generation", back, "bytes"),
        row("answers in one message", [answers], "bytes"),
        row("all that crosses / all messages", over, "x", at_most=1.25),
        row("Ray itself, there and back, all the time", [sum(idle)], "bytes/s"),
        row("a node and its engine join, there and back", [sum(before)], "bytes"),
    ]


async def time_rows(link: Link) -> list[Row]:
    """Without: what the slow link costs in time."""
    pool, generations = await started(PatientEngineBuilder(), link)
    quick, slow = await quick_and_slow(generations, link)
    await pool.close()
    more = [s - q for s, q in zip(seconds(slow), seconds(quick), strict=True)]
    return [
        row("an engine that answers over 1 s: a generation, quick link", seconds(quick), "s"),
        row("a generation, 10 Mbit/s and 100 ms", seconds(slow), "s"),
        row("more time a generation", more, "s", at_most=0.5),
        row("predicted: 3.5 round trips", [3.5 * ROUND_TRIP], "s"),
    ]


async def measured() -> list[Row]:
    """Start everything, and measure."""
    link = Link()
    start_head(num_engines=0)
    start_there(link)
    return [*await bytes_rows(link), *await time_rows(link)]


def main() -> None:
    """Measure and report, in namespaces made for it."""
    if os.getpid() != 1:  # The first process of its namespace.
        os.execvp("unshare", inside(sys.executable, "-m", "benchmarks.slow_link"))
    with rare_garbage_collection():
        rows = asyncio.run(measured())
    report("slow_link", rows)


if __name__ == "__main__":
    main()
