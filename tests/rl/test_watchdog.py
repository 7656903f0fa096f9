"""Code that holds the event loop is interrupted where it stands, and loses its own rollout."""

import asyncio
import ctypes
import functools
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

from es_cookbook.engines.base import SampleRequest
from es_cookbook.engines.torch.engine import TorchEngineBuilder
from es_cookbook.evolution.genome import Genome, Term
from es_cookbook.population.sampler import PopulationSampler
from es_cookbook.rl.rollouts import lost_rollouts
from es_cookbook.rl.timeouts import Clock, Watch
from es_cookbook.rl.types import Action, EnvGroup, LostRollout, SamplingParams, StepResult
from es_cookbook.runs.program import train
from es_cookbook.runs.tracking.jsonl import JsonlTrackerBuilder, read_metrics
from tests.blocking import SIX_KINDS, Awaiting, BlockingConfig, DatasetBuilder, Problem
from tests.fakes import FakeEngine
from tests.tiny_run import write_tiny_model

pytestmark = pytest.mark.anyio
TIMEOUT = 0.3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


async def history(
    model: Path, log_path: Path, where: str, kind: str, timeout: float = TIMEOUT
) -> tuple[bytes, float]:
    """A run's history, and the seconds that its rollouts took in the generation of interest."""
    config = BlockingConfig(
        model_name=str(model),
        log_path=str(log_path),
        engine=TorchEngineBuilder(num_lanes=1),
        trackers=JsonlTrackerBuilder(),
        dataset=DatasetBuilder(where=where, kind=kind),
        rollout_timeout=timeout,
    )
    await train(config)
    rows = read_metrics(log_path / "metrics.jsonl")
    lost = [row["rollouts/failed"] for row in rows if "rollouts/failed" in row]
    whole = where in ("make_envs", "group_rewards")
    assert lost == [0, 0 if where == "close" else 4 if whole else 1, 0]
    return (log_path / "history.jsonl").read_bytes(), rows[1]["time/sample"]


@pytest.fixture(scope="module")
def failed(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], bytes]:
    """The history of a run whose Env raised instead, by the place."""

    def made(where: str) -> bytes:
        log_path = tmp_path_factory.mktemp("failed")
        return anyio.run(history, model, log_path, where, "fail")[0]

    return functools.cache(made)


@pytest.mark.parametrize("where", ["sync", "async"])
@pytest.mark.parametrize("kind", [kind.__name__ for kind in SIX_KINDS])
@pytest.mark.slow
def test_an_env_that_blocks_loses_its_own_rollout_as_one_that_raises(
    model: Path, tmp_path: Path, failed: Callable[[str], bytes], where: str, kind: str
) -> None:
    blocked, seconds = anyio.run(history, model, tmp_path / "run", where, kind)
    assert TIMEOUT <= seconds < TIMEOUT + 10
    assert blocked == failed(where)


@pytest.mark.parametrize(
    ("where", "kind"),
    [
        ("initial_observation", "sleep"),
        ("task", "sleep"),
        ("make_envs", "sleep"),
        ("group_rewards", "sleep"),
        ("close", "sleep"),
        ("sync", "empty_queue"),
        ("sync", "program"),
        ("sync", "swallow_everything"),
        ("task", "swallow_everything"),
    ],
)
@pytest.mark.slow
def test_wherever_it_blocks_and_whatever_it_swallows(
    model: Path, tmp_path: Path, failed: Callable[[str], bytes], where: str, kind: str
) -> None:
    blocked, seconds = anyio.run(history, model, tmp_path / "run", where, kind)
    assert TIMEOUT <= seconds < TIMEOUT + 10
    assert blocked == failed(where)


@pytest.mark.parametrize(
    "kind", ["leave", "give_up", "stop_iteration", "cancelled", "cancelled_in_a_group"]
)
@pytest.mark.slow
def test_what_an_env_raises_to_end_things_ends_its_own_rollout(
    model: Path, tmp_path: Path, failed: Callable[[str], bytes], kind: str
) -> None:
    for where in ("sync", "async", "group_rewards"):
        ended, _ = anyio.run(history, model, tmp_path / where, where, kind)
        assert ended == failed(where)


@pytest.mark.parametrize("where", ["initial_observation", "sync", "async", "group_rewards"])
@pytest.mark.slow
def test_an_env_that_cancels_its_own_task_loses_its_own_rollout(
    model: Path, tmp_path: Path, failed: Callable[[str], bytes], where: str
) -> None:
    ended, _ = anyio.run(history, model, tmp_path / where, where, "cancel_itself")
    assert ended == failed(where)


class Sleepy(Awaiting):
    """Sleeps so many seconds in a step, once; gives what it gives whatever happens."""

    seconds = 0.0
    swallows = False

    async def step(self, action: Action) -> StepResult:
        if self.blocks:
            try:
                self.nap()
            except BaseException:
                if not self.swallows:
                    raise
        return StepResult(1.0, done=True)

    def nap(self) -> None:
        time.sleep(self.seconds)


class SleepyProblem(Problem):
    """A problem of which the second Env sleeps."""

    env: type[Sleepy] = Sleepy

    async def make_envs(self, num_envs: int) -> EnvGroup:
        return EnvGroup([self.env(self, i == 1) for i in range(num_envs)])


def sleepy(**attributes: Any) -> SleepyProblem:
    problem = SleepyProblem(0, "", "")
    object.__setattr__(problem, "env", type("Sleepy", (Sleepy,), attributes))
    return problem


async def lost_by(
    problem: Problem, *, engine: FakeEngine | None = None, genomes: int = 4, **settings: Any
) -> list[LostRollout]:
    sampling = SamplingParams(max_tokens=4)
    sampler = PopulationSampler(
        engine or FakeEngine(), sampling=sampling, max_failed_fraction=1, **settings
    )
    genomes_G = [Genome((Term(seed, 0.5),)) for seed in range(genomes)]
    return lost_rollouts(await sampler.rollout(0, [problem], genomes_G))


async def test_a_rollout_that_was_interrupted_names_file_and_line() -> None:
    line = Sleepy.nap.__code__.co_firstlineno + 1
    (lost,) = await lost_by(sleepy(seconds=100), rollout_timeout=TIMEOUT)
    assert lost.reason == (
        f"TimeoutError: Sleepy.nap ({__file__}:{line}) held the event loop for more than 0.3 s "
        "without a break (rollout_timeout)"
    )
    assert f'File "{__file__}", line {line}, in nap\n    time.sleep(self.seconds)' in lost.traceback


async def test_a_turn_that_holds_the_loop_for_longer_than_a_turn_may_take_is_interrupted() -> None:
    (lost,) = await lost_by(sleepy(seconds=100), turn_timeout=TIMEOUT)
    assert lost.reason.endswith("for more than 0.3 s without a break (turn_timeout)")


async def test_who_swallows_the_interruption_and_goes_on_is_lost_all_the_same() -> None:
    (lost,) = await lost_by(sleepy(seconds=100, swallows=True), rollout_timeout=TIMEOUT)
    assert "Sleepy.nap" in lost.reason


async def test_who_lets_go_in_time_is_not_lost() -> None:
    assert await lost_by(sleepy(seconds=0.4), rollout_timeout=1.0) == []


@pytest.mark.parametrize("kind", ["sleep", "loop", "swallow_everything"])
async def test_without_a_timer_of_the_kernel_a_thread_does_it(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    def no_timers(*_: object, **__: object) -> None:
        raise AttributeError("timer_create")

    monkeypatch.setattr(ctypes, "CDLL", no_timers)
    (lost,) = await lost_by(Problem(0, "sync", kind), rollout_timeout=TIMEOUT)
    assert "held the event loop" in lost.reason


async def test_an_engine_that_holds_the_loop_is_not_interrupted() -> None:
    class Slow(FakeEngine):
        async def sample(self, request: SampleRequest) -> Action:
            time.sleep(0.3)
            return await super().sample(request)

    assert await lost_by(sleepy(), engine=Slow(), rollout_timeout=0.1) == []


async def test_many_that_hold_it_for_a_moment_each_are_not_interrupted() -> None:
    class Busy(Problem):
        async def make_envs(self, num_envs: int) -> EnvGroup:
            every = type("Sleepy", (Sleepy,), {"seconds": 0.001})
            return EnvGroup([every(self, True) for _ in range(num_envs)])

    busy = Busy(0, "", "")
    assert await lost_by(busy, genomes=1000, rollout_timeout=0.2) == []


async def test_a_warning_names_who_holds_the_loop_once_a_place(
    caplog: pytest.LogCaptureFixture,
) -> None:
    env = sleepy(seconds=0.4).env(Problem(0, "", ""), True)
    warned: set[str] = set()
    for _ in range(2):
        watch = Watch(10, warn_after=0.2, warned=warned)
        clock = Clock(watch)
        with watch, clock:
            await env.step(Action((1,), "1", "stop"))
        assert clock.reason is None
    line = Sleepy.nap.__code__.co_firstlineno + 1
    assert caplog.messages == [
        f"Sleepy.nap ({__file__}:{line}) has held the event loop for 0.2 s, and with it the whole "
        "population: what takes long belongs in a worker process "
        "(es_cookbook.rl.grading.workers.in_worker)"
    ]


@pytest.mark.slow
async def test_the_warning_comes_after_five_seconds(caplog: pytest.LogCaptureFixture) -> None:
    began = time.time()
    assert await lost_by(sleepy(seconds=6.5)) == []
    assert "has held the event loop for 5 s" in caplog.text
    assert caplog.records[0].created - began > 4.9


async def test_outside_the_main_thread_it_only_warns_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def work() -> str | None:
        env = sleepy(seconds=0.7).env(Problem(0, "", ""), True)
        watch = Watch(0.4, warn_after=0.2)
        clock = Clock(watch)
        with watch, clock:
            await env.step(Action((1,), "1", "stop"))
        return clock.reason

    assert await anyio.to_thread.run_sync(asyncio.run, work()) is None
    (message,) = caplog.messages
    assert "it cannot be interrupted, because the loop is not in the main thread" in message


async def test_the_signals_handler_is_as_before_afterwards() -> None:
    def mine(number: int, frame: object) -> None: ...

    former = signal.signal(signal.SIGURG, mine)
    try:
        outer, inner = Watch(60), Watch(60)
        with outer:
            inner.__enter__()
            assert signal.getsignal(signal.SIGURG) is not mine
        assert signal.getsignal(signal.SIGURG) is not mine
        inner.__exit__()
        assert signal.getsignal(signal.SIGURG) is mine
    finally:
        signal.signal(signal.SIGURG, former)
