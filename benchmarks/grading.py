"""The cost of graders to concurrent sampling, and the speed of the safe arithmetic.

    python -m benchmarks.grading

One generation of the bundled Countdown model on the torch engine, 32 rank-1 genomes × 16 problems ×
24 tokens, by turns:

- with the usual grader, microseconds on the event loop;
- where every 16th rollout awaits 50 ms of processor time in a worker process, 1.6 s in all.

Graders need processor time, which sampling then has not. With S the sampling's own processor time
and G the graders', a generation should take (S + G) / S times as long. Sampling throughput is
corrected by that factor: 1 means that grading took its own time and nothing beyond it. On a machine
that other work shares, processes get the more of it the more they are, and the number is above 1.
The sampling's own processor time, with graders and without, does not depend on that.

Then `grade_countdown` on one core: clean demonstrations, and expressions of 200 characters whose
value is a fraction at every step.
"""

import asyncio
import dataclasses
import itertools
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness import mirrored_pairs, ratios, report, row, spend
from benchmarks.sampling import TOKENS, endless_model
from es_cookbook.engines.torch.engine import TorchEngineBuilder
from es_cookbook.evolution.spaces.low_rank import LowRank
from es_cookbook.population.sampler import PopulationSampler
from es_cookbook.recipes.countdown.arithmetic import MAX_LENGTH, CountdownReward, grade_countdown
from es_cookbook.recipes.countdown.dataset import CountdownDatasetBuilder
from es_cookbook.rl.grading.workers import in_worker
from es_cookbook.rl.types import (
    Action,
    Env,
    EnvGroup,
    EnvGroupBuilder,
    Observation,
    SamplingParams,
    StepResult,
)
from tools.bundled.countdown_demonstrations import demonstration, solved_problems

REPEATS = 7
GENOMES, PROBLEMS = 32, 16
SECONDS = 0.05
"""Processor seconds that a grader takes."""
ONE_IN = 16
"""A rollout in so many has such a grader."""
GENOMES_G = mirrored_pairs(GENOMES)


class SlowlyGraded(Env):
    """An Env whose grader takes long."""

    def __init__(self, env: Env) -> None:
        self._env = env

    async def initial_observation(self) -> Observation:
        """Return the Env's own."""
        return await self._env.initial_observation()

    async def step(self, action: Action) -> StepResult:
        """Step the Env, and take 50 ms more."""
        await in_worker(spend, SECONDS, timeout=600)
        return await self._env.step(action)


@dataclasses.dataclass(frozen=True)
class SometimesSlow(EnvGroupBuilder):
    """A problem with slow grading of every 16th Env."""

    builder: EnvGroupBuilder

    async def make_envs(self, num_envs: int) -> EnvGroup:
        """Return the problem's Envs."""
        group = await self.builder.make_envs(num_envs)
        slow = [SlowlyGraded(env) if i % ONE_IN == 0 else env for i, env in enumerate(group.envs)]
        return EnvGroup(slow)


@dataclasses.dataclass(frozen=True)
class Took:
    """Seconds of a generation: by the clock, and of processor time of this process alone."""

    clock: float
    own: float


def generation(
    loop: asyncio.AbstractEventLoop,
    sampler: PopulationSampler,
    builders: Sequence[EnvGroupBuilder],
) -> Took:
    """Run one generation."""
    clock, own = time.perf_counter(), time.process_time()
    loop.run_until_complete(sampler.rollout(0, builders, GENOMES_G))
    return Took(time.perf_counter() - clock, time.process_time() - own)


def corrected(usual: Took, graded: Took) -> float:
    """Return sampling throughput with graders over that without, per processor time available."""
    spent = SECONDS * GENOMES * PROBLEMS / ONE_IN
    return usual.clock / graded.clock * (usual.own + spent) / usual.own


def gradings_a_second(fractions: bool) -> float:
    """Measure `grade_countdown` on 2,000 texts, by this thread's processor time."""
    reward = CountdownReward()
    rng = random.Random(0)
    if fractions:
        terms = [[f"1/{rng.randint(2, 9)}" for _ in range(MAX_LENGTH // 4)] for _ in range(200)]
        texts = [f"<think></think><answer>{'+'.join(each)}</answer>" for each in terms]
        cases = [(text, (1,), 1) for text in texts]
    else:
        solved = itertools.islice(solved_problems(0), 2000)
        cases = [(demonstration(s), p.numbers, p.target) for p, s in solved]
    began = time.thread_time()
    grades = [grade_countdown(text, numbers, target, reward) for text, numbers, target in cases]
    seconds = time.thread_time() - began
    assert all(
        grade.metrics["well_formed"] and grade.metrics["correct"] != fractions for grade in grades
    )
    return len(cases) / seconds


def main() -> None:
    """Measure and report."""
    runner = asyncio.Runner()
    loop = runner.get_loop()
    run = loop.run_until_complete
    with tempfile.TemporaryDirectory() as directory:
        model = str(endless_model(Path(directory)))
        engine = run(TorchEngineBuilder()(model_name=model, search_space=LowRank(rank=1)))
    problems = run(CountdownDatasetBuilder(problems_per_generation=PROBLEMS)(engine.tokenizer))
    sampler = PopulationSampler(engine, sampling=SamplingParams(max_tokens=TOKENS))
    batch = problems.train.get_batch(0)
    slow = [SometimesSlow(builder) for builder in batch]
    by_turns = [
        (generation(loop, sampler, batch), generation(loop, sampler, slow))
        for _ in range(1 + REPEATS)
    ][1:]
    usual, worker = zip(*by_turns, strict=True)
    run(engine.close())
    runner.close()
    tokens = GENOMES * PROBLEMS * TOKENS
    gradings = [gradings_a_second(fractions=False) for _ in range(REPEATS)]
    report(
        "grading",
        [
            row("usual grader", [tokens / took.clock for took in usual], "tokens/s"),
            row("50 ms in workers", [tokens / took.clock for took in worker], "tokens/s"),
            row(
                "in workers: sampling throughput beyond what the graders use",
                [corrected(*pair) for pair in by_turns],
                "x",
                at_least=0.9,
            ),
            row(
                "in workers: processor time of sampling / without",
                ratios([took.own for took in worker], [took.own for took in usual]),
                "x",
                at_most=1.1,
            ),
            row("safe arithmetic: answers graded, a core", gradings, "/s", at_least=50_000),
            row(
                "the same: 200 characters of fractions",
                [gradings_a_second(fractions=True) for _ in range(REPEATS)],
                "/s",
            ),
        ],
    )


if __name__ == "__main__":
    main()
