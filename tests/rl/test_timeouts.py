"""Clocks of rollouts, time-outs, and the warning about blocked event loops."""

import time

import anyio
import pytest

from es_cookbook.rl import timeouts
from es_cookbook.rl.problem_env import Grade
from es_cookbook.rl.timeouts import Clock, Watch, turn_begins
from es_cookbook.rl.types import Action, Observation
from tests.fakes import Word


async def test_overdue_code_is_cancelled_with_its_traceback() -> None:
    watch = Watch(0.05)
    clock = Clock(watch)
    with watch, clock.running():
        await anyio.sleep_forever()
    assert clock.overdue_at is not None
    assert "sleep_forever" in clock.overdue_at
    assert not watch.clocks


async def test_waiting_for_the_engine_does_not_count() -> None:
    watch = Watch(0.5)
    clock = Clock(watch)
    with watch, clock.running(), clock.stopped():
        with clock.stopped():
            await anyio.sleep(0.4)
        await anyio.sleep(0.4)
    assert clock.overdue_at is None
    assert watch.seconds < 0.4


async def test_clocks_stop_while_the_event_loop_is_blocked() -> None:
    watch = Watch(0.3)
    clock = Clock(watch)

    async def hold() -> None:
        for _ in range(4):
            time.sleep(0.2)
            await anyio.sleep(0.001)

    with watch:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(hold)
            with clock.running():
                for _ in range(10):
                    await anyio.sleep(0.01)
    assert clock.reason is None


async def test_a_warning_names_the_method_that_blocks_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Slow(Word):
        def grade(self, text: str) -> Grade:
            time.sleep(0.6)
            return Grade(1.0)

    monkeypatch.setattr(timeouts, "WARN_AFTER", 0.2)
    for _ in range(2):
        watch = Watch(1)
        with watch, Clock(watch).running():
            await anyio.sleep(0)
            await Slow(Observation((1,))).step(Action((1,), "1", "stop"))
    (message,) = caplog.messages
    assert f"Slow.grade ({__file__}:" in message
    assert "has blocked the event loop, and with it all rollouts, for " in message
    assert "es_cookbook.rl.grading.workers.in_worker" in message


async def test_turn_timeout_cancels_a_long_turn() -> None:
    watch = Watch(60, turn_timeout=0.1)
    clock = Clock(watch)
    with watch, clock.running():
        for _ in range(4):  # turns that are in time, together longer
            turn_begins()
            await anyio.sleep(0.05)
            with clock.stopped():
                await anyio.sleep(0.2)
        turn_begins()
        await anyio.sleep_forever()
    assert clock.reason == "TimeoutError: a turn not done after 0.1 s (turn_timeout)"
    assert clock.overdue_at is not None and "sleep_forever" in clock.overdue_at
