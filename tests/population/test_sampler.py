"""Every genome meets every problem with the same luck, and what fails costs no more than itself."""

import asyncio
import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

from es_cookbook import (
    Env,
    EnvGroupBuilder,
    Observation,
    PopulationSampler,
    SamplingParams,
    StepResult,
)
from es_cookbook.common.errors import ConfigError, EngineError, RequestError, TooManyLostError
from es_cookbook.engines.base import SampleRequest
from es_cookbook.evolution.genome import Genome, Term
from es_cookbook.rl.data.problem_dataset import deal
from es_cookbook.rl.rollouts import lost_rollouts, mean_rewards
from es_cookbook.rl.types import Action, EnvGroup, GroupReward, LostRollout, Policy, Trajectory
from es_cookbook.runs.directory.directory import add_to_log
from tests.fakes import FakeEngine, FakePool

GENOMES = [Genome((Term(seed, 0.5),)) for seed in range(6)]
WARM = SamplingParams(max_tokens=8, temperature=1.0)


class DigitEnv(Env):
    """Reward: the answer as a number."""

    def __init__(self, problem: "Problem", index: int) -> None:
        self.problem = problem
        self.index = index

    async def initial_observation(self) -> Observation:
        return Observation((self.problem.number + 1,))

    async def step(self, action: Action) -> StepResult:
        if self.problem.misbehave is not None:
            result = await self.problem.misbehave(self, action)
            if result is not None:
                return result
        return StepResult(float(action.text), True, metrics={"digits": len(action.text)})


class Group(EnvGroup):
    """Writes down that it was closed."""

    def __init__(self, problem: "Problem", envs: Sequence[Env]) -> None:
        super().__init__(envs)
        self.problem = problem

    async def close(self) -> None:
        await anyio.sleep(0)
        self.problem.closed.append(self.problem.number)


@dataclasses.dataclass(frozen=True)
class Problem(EnvGroupBuilder):
    number: int
    closed: list[int] = dataclasses.field(default_factory=list[int])
    misbehave: Callable[[DigitEnv, Action], Any] | None = None

    async def make_envs(self, num_envs: int) -> EnvGroup:
        return Group(self, [DigitEnv(self, i) for i in range(num_envs)])

    @property
    def tags(self) -> tuple[str, ...]:
        return ("even",) if self.number % 2 == 0 else ("odd",)


def sampler(engine: FakeEngine, **settings: Any) -> PopulationSampler:
    return PopulationSampler(engine, **{"sampling": WARM, "run_seed": 3} | settings)


async def test_every_genome_meets_every_problem_in_its_place() -> None:
    engine = FakeEngine(
        answer=lambda who, request: f"{who.terms[0].seed}{request.observation.tokens_T[0]}"  # pyright: ignore
    )
    closed: list[int] = []
    problems = [Problem(p, closed) for p in range(3)]
    groups = await sampler(engine).rollout(0, problems, GENOMES)
    assert engine.loads == [GENOMES]
    assert mean_rewards(groups).tolist() == [
        [float(f"{g}{p + 1}") for g in range(6)] for p in range(3)
    ]
    assert [group.tags for group in groups] == [("even",), ("odd",), ("even",)]
    assert sorted(closed) == [0, 1, 2]


async def test_many_engines_give_what_one_gives() -> None:
    problems = [Problem(p) for p in range(3)]
    of_one = await sampler(FakeEngine(), attempts=2).rollout(5, problems, GENOMES)
    for num_engines, capacity in [(2, 9), (4, 9), (2, 2)]:
        hosts_E = [FakeEngine(capacity) for _ in range(num_engines)]
        of_many = await sampler(FakePool(hosts_E), attempts=2).rollout(5, problems, GENOMES)
        assert of_many == of_one
        loaded = [genome for host in hosts_E for load in host.loads for genome in load]
        assert sorted(map(str, loaded)) == sorted(map(str, GENOMES)), "each genome runs once"
        assert all(host.loads for host in hosts_E[:2])
    assert problems[0].closed == [0] * 4, "once a rollout, however many blocks"


async def test_genomes_share_their_luck_and_nothing_else_does() -> None:
    engine = FakeEngine()
    sample = sampler(engine, attempts=2)
    await sample.rollout(0, [Problem(0), Problem(1)], GENOMES)
    await sample.rollout(1, [Problem(0), Problem(1)], GENOMES)
    seeds_of = {genome: [] for genome in GENOMES}
    for who, request in engine.requests:
        seeds_of[who].append((request.observation.tokens_T, request.seed))  # pyright: ignore
    assert len({tuple(sorted(seeds)) for seeds in seeds_of.values()}) == 1
    seeds = [seed for _, seed in seeds_of[GENOMES[0]]]
    assert len(set(seeds)) == 8, "2 generations x 2 problems x 2 attempts"
    again = FakeEngine()
    await sampler(again, attempts=2).rollout(1, [Problem(0), Problem(1)], GENOMES)
    assert [r.seed for _, r in again.requests] == [r.seed for _, r in engine.requests[24:]]
    other = FakeEngine()
    await sampler(other, attempts=2, run_seed=4).rollout(1, [Problem(0)], GENOMES)
    assert not {r.seed for _, r in other.requests} & set(seeds)


async def misbehave_for_one(env: DigitEnv, action: Action) -> StepResult | None:
    """Env 2 raises, env 3 hangs, env 4 gives NaN, env 5 something else."""
    if env.index == 2:
        raise KeyError("boom\nand more")
    if env.index == 3:
        await anyio.sleep_forever()
    if env.index == 4:
        return StepResult(math.nan, True)
    return "done" if env.index == 5 else None  # pyright: ignore


async def test_a_failing_env_loses_its_own_rollout_only() -> None:
    problems = [Problem(0, misbehave=misbehave_for_one), Problem(1)]
    sample = sampler(FakeEngine(), rollout_timeout=0.1, max_failed_fraction=0.4)
    groups = await sample.rollout(0, problems, GENOMES)
    assert np.isnan(mean_rewards(groups)).tolist() == [[False] * 2 + [True] * 4, [False] * 6]
    lost = lost_rollouts(groups)
    assert [rollout.reason for rollout in lost] == [
        "KeyError: 'boom\\nand more'",
        "TimeoutError: not done after 0.1 s (rollout_timeout)",
        "EnvError: DigitEnv.step must give a finite number as reward, found float nan",
        "EnvError: DigitEnv.step must give a StepResult, found str 'done'",
    ]
    assert "sleep_forever" in lost[1].traceback, "where it hung"
    assert all("misbehave" in rollout.traceback for rollout in lost[:2])
    assert problems[0].closed == [0]


async def test_the_first_lost_rollout_of_each_kind_is_told_with_its_traceback_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    problems = [Problem(0, misbehave=misbehave_for_one), Problem(1)]
    sample = sampler(
        FakeEngine(),
        rollout_timeout=0.1,
        max_failed_fraction=0.5,
        log=functools.partial(add_to_log, tmp_path),
    )
    for generation in (3, 4):
        await sample.rollout(generation, problems, GENOMES)
    boom, timeout, nan, done = (record.getMessage() for record in caplog.records)
    assert boom == (
        "generation 4: 1 of 12 rollouts lost, the first at problem 0 by genome 2: "
        f"KeyError: 'boom\\nand more'; its traceback is in {tmp_path}/log.txt"
    )
    assert "by genome 3: TimeoutError: not done after 0.1 s" in timeout
    assert "by genome 4: EnvError: DigitEnv.step must give a finite number" in nan
    assert "by genome 5: EnvError: DigitEnv.step must give a StepResult" in done
    log = (tmp_path / "log.txt").read_text()
    assert log.count("Traceback (most recent call last)") == 4
    assert "in misbehave_for_one" in log


async def test_too_many_lost_stop_the_run_with_the_first_traceback() -> None:
    problems = [Problem(0, misbehave=misbehave_for_one), Problem(1)]
    sample = sampler(FakeEngine(), rollout_timeout=0.1, max_failed_fraction=0.3)
    with pytest.raises(TooManyLostError) as caught:
        await sample.rollout(7, problems, GENOMES)
    sentence, _, rest = str(caught.value).partition("\n")
    assert sentence == (
        "4 of the 12 rollouts of generation 8 were lost, more than max_failed_fraction=0.3 allows; "
        "the first: KeyError: 'boom\\nand more'"
    )
    frames = [line for line in rest.splitlines() if line.startswith("  File ")]
    assert all(line.startswith(f'  File "{Path(__file__).parents[1]}') for line in frames)
    assert "in misbehave_for_one" in frames[-1], "the user's own lines, and no library's"
    assert "Traceback" not in rest


async def test_the_time_out_does_not_count_waiting_for_the_engine() -> None:
    class Slow(FakeEngine):
        async def sample(self, request: SampleRequest) -> Action:
            await anyio.sleep(0.3)
            return await super().sample(request)

    sample = sampler(Slow(), rollout_timeout=0.1, max_failed_fraction=0)
    groups = await sample.rollout(0, [Problem(0)], GENOMES)
    assert not lost_rollouts(groups)
    assert sample.seconds.score < 0.1 < sample.seconds.sample


@pytest.mark.parametrize("error", [RequestError("prompt of 70 tokens"), EngineError("it died")])
@pytest.mark.parametrize("in_task_group", [False, True])
async def test_what_no_rollout_survives_stops_the_run(
    error: Exception, in_task_group: bool
) -> None:
    def fail(who: Genome | str, request: SampleRequest) -> str:
        if request.observation.tokens_T == (99,):
            raise error
        return "1"

    async def ask(env: DigitEnv, action: Action) -> None:
        if not in_task_group:
            await env.policy.sample(Observation((99,)))
        else:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(env.policy.sample, Observation((99,)))

    closed: list[int] = []
    problems = [Problem(0, closed), Problem(1, closed, ask), Problem(2, closed)]
    with pytest.raises(type(error)) as caught:
        await sampler(FakeEngine(answer=fail)).rollout(0, problems, GENOMES)
    assert caught.value is error
    assert sorted(closed) == [0, 1, 2]


@pytest.mark.parametrize("limit", [anyio.fail_after, asyncio.timeout])
async def test_cancellation_closes_every_group_and_goes_through(
    limit: Callable[[float], Any],
) -> None:
    async def hang(env: DigitEnv, action: Action) -> None:
        await anyio.sleep_forever()

    closed: list[int] = []
    problems = [Problem(p, closed, hang) for p in range(3)]
    with pytest.raises(TimeoutError):
        async with contextlib.AsyncExitStack() as stack:
            timeout = limit(0.5)
            if limit is asyncio.timeout:  # Cancels the task itself, not a scope of anyio's.
                await stack.enter_async_context(timeout)
            else:
                stack.enter_context(timeout)
            await sampler(FakeEngine()).rollout(0, problems, GENOMES)
    assert sorted(closed) == [0, 1, 2]


class Fragile(Problem):
    """Fails in one of the group's own methods."""

    where: str = ""

    async def make_envs(self, num_envs: int) -> EnvGroup:
        if self.where == "make":
            raise OSError("no sandbox left")
        if self.where == "few":
            num_envs -= 1
        if self.where == "type":
            return []  # pyright: ignore
        return await super().make_envs(num_envs)

    async def compute_group_rewards(
        self, trajectories: Sequence[Trajectory | LostRollout], policies: Sequence[Policy]
    ) -> Sequence[GroupReward] | None:
        if self.where == "hang":
            await anyio.sleep_forever()
        return [GroupReward(1.0)] if self.where == "score" else None


@pytest.mark.parametrize(
    ("where", "reason"),
    [
        ("make", "OSError: no sandbox left"),
        ("few", "EnvError: Fragile.make_envs must give 6 Envs, found 5"),
        ("type", "EnvError: Fragile.make_envs must give an EnvGroup, found list"),
        ("score", "EnvError: Fragile.compute_group_rewards must give None or 6 GroupRewards, "),
        ("hang", "TimeoutError: not done after 0.1 s (rollout_timeout)"),
    ],
)
async def test_a_failing_group_is_lost_as_a_whole(where: str, reason: str) -> None:
    fragile = Fragile(0)
    object.__setattr__(fragile, "where", where)
    sample = sampler(FakeEngine(), max_failed_fraction=0.5, rollout_timeout=0.1)
    groups = await sample.rollout(0, [fragile, Problem(1)], GENOMES)
    assert np.isnan(mean_rewards(groups)).tolist() == [[True] * 6, [False] * 6]
    assert all(rollout.reason.startswith(reason) for rollout in lost_rollouts(groups))
    assert fragile.closed == ([] if where in ("make", "type") else [0])


class Duel(Problem):
    """The best answer of the group wins; the centre is asked as well."""

    async def compute_group_rewards(
        self, trajectories: Sequence[Trajectory | LostRollout], policies: Sequence[Policy]
    ) -> Sequence[GroupReward] | None:
        rewards = [t.reward if isinstance(t, Trajectory) else -1.0 for t in trajectories]
        await policies[0].centre.sample(Observation((1,)))
        if self.number == 9:
            await policies[0].sample(Observation((1,)))
        return [GroupReward(100.0 if r == max(rewards) else 0.0, {"won": 1.0}) for r in rewards]


async def test_group_rewards_see_the_whole_group_over_blocks() -> None:
    plain = await sampler(FakeEngine(), attempts=2).rollout(0, [Problem(0)], GENOMES)
    duel = await sampler(FakeEngine(capacity=4), attempts=2).rollout(0, [Duel(0)], GENOMES)
    best = max(max(rewards_K) for rewards_K in plain[0].rewards_G_K)
    assert duel[0].rewards_G_K == [
        [r + (100.0 if r == best else 0.0) for r in rewards_K] for rewards_K in plain[0].rewards_G_K
    ]


class Judged(Problem):
    """One answer of the group could not be judged."""

    async def compute_group_rewards(
        self, trajectories: Sequence[Trajectory | LostRollout], policies: Sequence[Policy]
    ) -> Sequence[GroupReward | LostRollout]:
        judged = [GroupReward(1.0, {"judged": 1.0}) for _ in trajectories]
        return [*judged[:2], LostRollout("no verdict", ""), *judged[3:]]


async def test_a_group_reward_can_lose_its_own_rollout() -> None:
    (plain,) = await sampler(FakeEngine()).rollout(0, [Problem(0)], GENOMES)
    (group,) = await sampler(FakeEngine(), max_failed_fraction=0.5).rollout(0, [Judged(0)], GENOMES)
    expected = [[reward + 1.0 for reward in rewards_K] for rewards_K in plain.rewards_G_K]
    expected[2] = [math.nan]
    assert np.array(group.rewards_G_K) == pytest.approx(np.array(expected), nan_ok=True)
    assert [lost.reason for lost in lost_rollouts([group])] == ["no verdict"]
    with pytest.raises(TooManyLostError, match=r"1 of the 6 rollouts .*: no verdict"):
        await sampler(FakeEngine(), max_failed_fraction=0).rollout(0, [Judged(0)], GENOMES)


async def test_group_rewards_may_ask_genomes_that_are_still_resident() -> None:
    await sampler(FakeEngine(capacity=6)).rollout(0, [Duel(9)], GENOMES)
    with pytest.raises(RequestError, match="genome 0 was asked after the engine had gone on"):
        await sampler(FakeEngine(capacity=4)).rollout(0, [Duel(9)], GENOMES)


class Match(Duel):
    """Every genome is asked again, and what it says is its reward."""

    @property
    def asks_genomes(self) -> bool:
        return True

    async def compute_group_rewards(
        self, trajectories: Sequence[Trajectory | LostRollout], policies: Sequence[Policy]
    ) -> Sequence[GroupReward]:
        texts = [(await policy.sample(Observation((1,)))).text for policy in policies]
        return [GroupReward(float(text), logs={"said": text}) for text in texts]


@pytest.mark.parametrize("num_engines", [1, 3])
async def test_a_population_that_is_asked_and_does_not_fit_is_refused(num_engines: int) -> None:
    engine = FakeEngine(capacity=4)
    if num_engines > 1:
        engine = FakePool([FakeEngine(capacity=4) for _ in range(num_engines)])
    for asking in (Match(1), *deal([Problem(0), Match(1)], 2)):
        with pytest.raises(
            ConfigError, match="all 6 have to be resident on one engine, which hosts 4: lower"
        ):
            await sampler(engine).rollout(0, [Problem(0), asking], GENOMES)
    assert engine.loads == []


async def test_an_engine_that_fails_stops_the_run_and_every_engine_is_given_back() -> None:
    class Fails(FakeEngine):
        async def load(self, genomes_G: Sequence[Genome]) -> None:
            raise EngineError("it died")

    class Slow(FakeEngine):
        async def sample(self, request: SampleRequest) -> Action:
            return await anyio.sleep_forever()

    closed: list[int] = []
    pool = FakePool([Slow(), Fails(), Slow()])
    with pytest.raises(EngineError, match=r"^it died$"):
        await sampler(pool).rollout(0, [Problem(0, closed), Problem(1, closed)], GENOMES)
    assert sorted(closed) == [0, 1]
    with anyio.fail_after(1):
        for _ in range(3):
            async with pool.lend():
                pass


async def test_what_is_in_is_counted_while_others_are_still_asked() -> None:
    seen: list[tuple[int, float]] = []
    its_sampler = sampler(FakeEngine(answer=lambda *_: "4"), attempts=2)

    async def look(env: DigitEnv, action: Action) -> None:
        now = its_sampler.underway.rollouts
        assert now is not None and now.generation == 5 and not now.is_over
        seen.append((now.num_done, now.mean_reward))

    problems = [Problem(0, misbehave=look), Duel(1)]
    await its_sampler.rollout(5, problems, GENOMES)
    now = its_sampler.underway.rollouts
    assert now is not None and now.is_over
    assert (now.num_done, now.count, now.mean_reward) == (24, 24, 4.0)
    assert len(seen) == 12 and 0 < seen[-1][0] < 24
    await its_sampler.rollout(6, [Duel(1)], GENOMES)
    now = its_sampler.underway.rollouts
    assert now is not None and math.isnan(now.mean_reward), "the group has yet to say"


async def test_the_centre_meets_each_problem_once() -> None:
    engine = FakeEngine()
    greedy = SamplingParams(max_tokens=8)
    groups = await sampler(engine, attempts=4).rollout_centre([Problem(0), Problem(1)], greedy)
    assert [(who, request.params) for who, request in engine.requests] == [("centre", greedy)] * 2
    assert mean_rewards(groups).shape == (2, 1)
    assert engine.loads == []


@pytest.mark.parametrize(
    ("hangs", "says"), [(False, "sandbox busy"), (True, "TimeoutError: not done after 0.1 s")]
)
async def test_a_group_that_fails_to_close_loses_nothing(
    caplog: pytest.LogCaptureFixture, hangs: bool, says: str
) -> None:
    class Stuck(EnvGroup):
        async def close(self) -> None:
            if hangs:
                await anyio.sleep_forever()
            raise OSError("sandbox busy")

    class Sticky(Problem):
        async def make_envs(self, num_envs: int) -> EnvGroup:
            return Stuck([DigitEnv(self, i) for i in range(num_envs)])

    sample = sampler(FakeEngine(), rollout_timeout=0.1)
    assert not lost_rollouts(await sample.rollout(0, [Sticky(0)], GENOMES))
    assert "closing a group of" in caplog.text
    assert says in caplog.text
