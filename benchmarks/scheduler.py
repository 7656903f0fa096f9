"""What the sampler itself costs: microseconds a rollout on top of its engine and its Env.

An engine that answers at once and an Env that grades at once leave the scheduling: a task, a clock,
a request with its sampling seed, the checks of the Env contract, the records. It shares the
interpreter lock with the engine's threads, so 2,048 rollouts a generation must not cost a tenth of
the generation.

    python -m benchmarks.scheduler
"""

import asyncio
import dataclasses
import gc

import anyio

from benchmarks.harness import interleaved, report, row
from es_cookbook.engines.base import SampleRequest
from es_cookbook.evolution.genome import Genome, Term
from es_cookbook.population_sampler import PopulationSampler
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
from tests.fakes import FakeEngine

PROBLEMS, GENOMES = 32, 64
OBSERVATION = Observation(tuple(range(30)))
ACTION = Action(tuple(range(24)), "(1 + 2) * 3", "stop")


class InstantEngine(FakeEngine):
    async def sample(self, request: SampleRequest) -> Action:
        await asyncio.sleep(0)
        return ACTION


class InstantEnv(Env):
    async def initial_observation(self) -> Observation:
        return OBSERVATION

    async def step(self, action: Action) -> StepResult:
        return StepResult(1.0, done=True, metrics={"correct": 1.0, "format": 1.0})


@dataclasses.dataclass(frozen=True)
class InstantProblem(EnvGroupBuilder):
    async def make_envs(self, num_envs: int) -> EnvGroup:
        return EnvGroup([InstantEnv() for _ in range(num_envs)])


async def scheduled() -> None:
    """A generation as the loop runs it."""
    sampler = PopulationSampler(InstantEngine(), sampling=SamplingParams())
    genomes_G = [Genome((Term(seed, 1.0),)) for seed in range(GENOMES)]
    groups_P = await sampler.rollout(0, [InstantProblem()] * PROBLEMS, genomes_G)
    mean_rewards(groups_P)
    env_metrics(groups_P)


async def bare() -> None:
    """The same calls of engine and Env, one after the other."""
    engine = InstantEngine()
    params = SamplingParams()
    for _ in range(PROBLEMS * GENOMES):
        env = InstantEnv()
        observation = await env.initial_observation()
        await env.step(await engine.sample(SampleRequest(0, observation, params)))


def main() -> None:
    """Measure and report."""
    gc.freeze()  # As the loop does.
    times = interleaved(
        {"scheduled": lambda: anyio.run(scheduled), "bare": lambda: anyio.run(bare)}, repeats=15
    )
    overheads = [
        (scheduled - bare) / (PROBLEMS * GENOMES) * 1e6
        for scheduled, bare in zip(times["scheduled"], times["bare"], strict=True)
    ]
    report("scheduler", [row("scheduling, a rollout", overheads, "µs", at_most=100)])


if __name__ == "__main__":
    main()
