import contextlib
import io
import math
import os
import subprocess
import sys
import weakref
from collections.abc import Mapping
from pathlib import Path

import pytest
from rich.console import Console

from es_cookbook.rl.types import Action, Observation, Trajectory, TrajectoryGroup, Transition
from es_cookbook.runs.tracking.base import RunInfo
from es_cookbook.runs.tracking.live import (
    LiveTrackerBuilder,
    PlainTracker,
    ScreenTracker,
    line_of,
)

METRICS = {
    "reward/mean": 0.4,
    "env/all/correct": 0.25,
    "throughput/answers_per_second": 46.4,
    "throughput/tokens_per_second": 12_345.0,
    "time/sample": 1.0,
}


class Clock:
    """Stands in for time."""

    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now


def info(path: Path, start_generation: int = 0) -> RunInfo:
    return RunInfo(path, "{}", run_seed=0, num_generations=10, start_generation=start_generation)


def plain(
    path: Path, *rows: Mapping[str, float], seconds: float = 0.0, start: int = 0
) -> list[str]:
    """The lines of a run with these metrics, a generation each unless they say which."""
    clock, out = Clock(), io.StringIO()
    with contextlib.redirect_stdout(out):
        tracker = PlainTracker(info(path, start), clock)
        for number, row in enumerate(rows):
            clock.now += seconds
            generation = round(row.get("progress/generation", number))
            tracker.log(generation, row)
            tracker.recorded(generation + 1)
        tracker.close()
    return out.getvalue().splitlines()


def drawn(path: Path, *rows: Mapping[str, float], action: str | None = None, start: int = 0) -> str:
    """What a terminal of 100 columns is sent for these generations, and one rollout."""
    sent = io.StringIO()
    console = Console(file=sent, force_terminal=True, width=100, height=40, highlight=False)
    tracker = ScreenTracker(info(path), 6, console, Clock())
    if action is not None:
        transition = Transition(Observation((1,)), Action((2,), action, "stop"), 1.0, {}, {})
        tracker.log_rollouts(0, [TrajectoryGroup([[Trajectory((transition,))]])], str)
    for generation, row in enumerate(rows):
        tracker.log(generation, row)
    tracker.recorded(len(rows))
    tracker.close()
    tracker.close()
    return sent.getvalue()


def test_plain_lines_tell_a_generation_each(tmp_path: Path) -> None:
    last = {"progress/generation": 10, "test/env/all/correct": 0.655}
    assert plain(tmp_path, METRICS, METRICS, last, seconds=30) == [
        "generation 1/10  reward 0.400  correct 0.250  46 answers/s  4:30 left",
        "generation 1 of 10 took 30 s: the run takes about 5.0 min",
        "generation 2/10  reward 0.400  correct 0.250  46 answers/s  4:00 left",
        "finished  held-out correct 0.655",
    ]


def test_what_goes_wrong_is_told_once_and_stays_on_the_screen(tmp_path: Path) -> None:
    cut = {"reward/mean": 0.4, "rollouts/mean_tokens": 30.0, "rollouts/truncated": 0.5}
    first, finding, second = plain(tmp_path, cut, cut)
    assert first.startswith("generation 1/10  ") and second.startswith("generation 2/10  ")
    assert finding == (
        "generation 1/10: 50% of the answers were cut off at sampling.max_tokens: raise it, or ask "
        "for shorter answers"
    )
    sent = drawn(tmp_path, cut, cut)
    assert "30 tokens an answer  ·  50% of answers cut" in sent
    assert "50% of the answers were cut off at sampling.max_tokens" in sent


def test_held_out_values_say_how_sure_they_are(tmp_path: Path) -> None:
    within = {"test/low/env/all/correct": 0.2, "test/high/env/all/correct": 0.5}
    measured = {**METRICS, "test/env/all/correct": 0.33, "test/problems": 40, **within}
    (line,) = plain(tmp_path, measured)
    assert line.startswith(
        "generation 1/10  reward 0.400  correct 0.250  held-out correct 0.330 (0.200 to 0.500)  "
    )
    assert len(line) <= 100
    sent = drawn(tmp_path, measured, METRICS)
    assert "95 %" in sent and sent.count("0.200 to 0.500") == sent.count("95 %")


def test_what_else_was_asked_for_is_shown(tmp_path: Path) -> None:
    measured = {"reward/mean": 0.4, "objective/mean": 0.7, "env/all/kl": 0.02}
    measured |= {"test/pass@1": 0.25, "test/pass@4": 0.5}
    assert plain(tmp_path, measured) == [
        "generation 1/10  reward 0.400  held-out pass@1 0.250  held-out pass@4 0.500  0:00 left"
    ]
    names = ("objective", "kl", "held-out pass@1", "held-out pass@4")
    assert all(name in drawn(tmp_path, measured) for name in names)


def test_a_line_has_a_hundred_columns_and_what_tells_most(tmp_path: Path) -> None:
    metrics = {
        "reward/mean": 0.4,
        "reward/max_genome": 0.8,
        **{f"env/all/part_{number}": 0.5 for number in range(9)},
        "env/all/correct": 0.3,
        "test/reward/mean": 0.5,
        "test/env/all/correct": 0.25,
        "test/low/env/all/correct": 0.2,
        "test/high/env/all/correct": 0.3,
        "test/problems": 500.0,
        "throughput/answers_per_second": 46.0,
        "rollouts/mean_tokens": 12.0,
    }
    (line, *_) = plain(tmp_path, metrics)
    assert line == (
        "generation 1/10  reward 0.400  correct 0.300  held-out correct 0.250 (0.200 to 0.300)  "
        "0:00 left"
    )
    assert line_of("finished", {f"env/all/{'x' * 70}": 0.5}) == f"finished  {'x' * 70} 0.500"
    assert len(line_of(f"generation {'1' * 100}", metrics)) > 100, "what has to be said is said"


def test_counts_of_what_never_happened_take_no_room(tmp_path: Path) -> None:
    zero = {"env/all/tool_calls": 0.0, "test/env/all/malformed_calls": 0.0, "env/all/correct": 0.0}
    once = {"reward/mean": 0.5, "env/all/tool_calls": 0.25}
    first, second, *_ = plain(tmp_path, {"reward/mean": 0.5, **zero}, once)
    assert "calls" not in first and "correct 0.000" in first
    assert "tool_calls 0.250" in second


def test_standard_output_that_is_no_terminal_gets_plain_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tracker = LiveTrackerBuilder()(info(tmp_path))
    assert isinstance(tracker, PlainTracker)
    tracker.log(0, {"env/all/\x1b[2Jevil": 1.0})
    tracker.recorded(0)
    printed = capsys.readouterr().out
    assert "\x1b" not in printed and r"\x1b[2Jevil 1.000" in printed


def test_time_left_counts_only_what_this_process_has_run(tmp_path: Path) -> None:
    rows = [{"progress/generation": generation} for generation in (6, 7, 8, 9)]
    assert plain(tmp_path, *rows, seconds=10, start=6) == [
        f"generation {generation + 1}/10  0:{10 * (9 - generation):02d} left"
        for generation in (6, 7, 8, 9)
    ]
    clock, sent = Clock(), io.StringIO()
    console = Console(file=sent, force_terminal=True, width=100, highlight=False)
    tracker = ScreenTracker(info(tmp_path, 6), 0, console, clock)
    clock.now += 10
    tracker.log(6, {})
    tracker.recorded(7)
    clock.now += 4
    tracker.close()
    assert "7/10" in sent.getvalue() and "0:26 left" in sent.getvalue()


def test_a_generation_is_not_shown_before_it_counts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tracker = PlainTracker(info(tmp_path), Clock())
    tracker.log(0, METRICS)
    tracker.close()
    assert capsys.readouterr().out == ""


def test_the_screen_shows_progress_numbers_and_an_answer(tmp_path: Path) -> None:
    sent = drawn(tmp_path, METRICS, action="<answer>44 + 35 + 19</answer>")
    for part in ("1/10", "reward", "0.400", "46 answers/s", "<answer>44 + 35 + 19</answer>"):
        assert part in sent
    assert "time/sample" not in sent


def test_the_screen_of_a_resumed_run_begins_with_what_was_measured_before(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(
        '{"progress/generation": 0, "test/env/all/correct": 0.123}\n'
    )
    assert "0.123" in drawn(tmp_path, METRICS)


class Measured(float):
    """A number that can be asked whether anybody still has it."""


def test_the_screen_of_a_long_run_keeps_and_draws_no_more_than_that_of_a_short_one(
    tmp_path: Path,
) -> None:
    sent = io.StringIO()
    console = Console(file=sent, force_terminal=True, width=100, highlight=False)
    tracker = ScreenTracker(RunInfo(tmp_path, "{}", 0, num_generations=1_000), 0, console, Clock())
    measured: list[weakref.ref[Measured]] = []
    for generation in range(1_000):
        value = Measured(generation if generation != 500 else math.nan)
        measured.append(weakref.ref(value))
        tracker.log(generation, {"reward/mean": value, "time/sample": value})
        del value
    assert sum(value() is not None for value in measured) < 110
    tracker.recorded(1_000)
    tracker.close()
    # First, largest, last; and a trend that rises all the way, on as many columns as ever.
    (line,) = {line for line in sent.getvalue().splitlines() if "reward" in line}
    assert all(number in line for number in ("0.000", "999.0"))
    bars = [bar for bar in line if bar in "▁▂▃▄▅▆▇█"]
    assert bars == sorted(bars) and (bars[0], bars[-1]) == ("▁", "█") and len(bars) == 24


def test_a_model_cannot_paint_on_the_terminal(tmp_path: Path) -> None:
    hostile = (
        "[red]bold[/red] [link=file:///etc]x[/link] \x1b[2J\x1b]0;title\x07 \u202egnp.exe \r\x9b1A"
    )
    sent = drawn(tmp_path, METRICS, action=hostile)
    assert "[red]bold[/red] [link=file:///etc]x[/link]" in sent, "markup stays text"
    for sequence in ("\x1b[2J", "\x1b]0;", "\x07", "\u202e", "\x9b"):
        assert sequence not in sent
    assert r"\x1b[2J" in sent and r"\u202egnp.exe" in sent


PIPED = """
import os
import sys
from pathlib import Path
from es_cookbook.runs.tracking.base import RunInfo
from es_cookbook.runs.tracking.live import LiveTrackerBuilder
tracker = LiveTrackerBuilder()(RunInfo(Path(sys.argv[1]), "{}", 0, 10))
print("ready", flush=True)
sys.stdin.readline()
for generation in range(10):
    tracker.log(generation, {"reward/mean": 1.0})
    tracker.recorded(generation)
tracker.close()
print("the run went on", file=sys.stderr, flush=True)
os._exit(0)  # Past the interpreter's own last flush, which a closed pipe fails too.
"""


def test_a_closed_pipe_switches_the_view_off_and_the_run_goes_on(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PIPED, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as run:
        assert run.stdin and run.stdout and run.stderr
        assert run.stdout.readline() == "ready\n"
        run.stdout.close()
        run.stdin.write("go\n")
        run.stdin.flush()
        said = run.stderr.read()
    assert run.returncode == 0
    assert said.count("the live view is off") == 1 and "the run went on" in said


INTERRUPTED = """
import os, signal, sys
from pathlib import Path
from es_cookbook.runs.tracking.base import RunInfo
from es_cookbook.runs.tracking.live import LiveTrackerBuilder
tracker = LiveTrackerBuilder()(RunInfo(Path(sys.argv[1]), "{}", 0, 10))
try:
    tracker.log(0, {"reward/mean": 1.0})
    tracker.recorded(0)
    os.kill(os.getpid(), signal.SIGINT)
    tracker.log(1, {"reward/mean": 1.0})
except KeyboardInterrupt:
    pass
finally:
    tracker.close()
print("after")
"""


@pytest.mark.parametrize(("term", "is_screen"), [("xterm", True), ("dumb", False)])
def test_ctrl_c_in_a_real_terminal_gives_the_cursor_back(
    tmp_path: Path, term: str, is_screen: bool
) -> None:
    ours, theirs = os.openpty()
    with subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, str(tmp_path)],
        stdout=theirs,
        env={**os.environ, "TERM": term},
    ) as run:
        os.close(theirs)
        sent = b""
        while True:
            try:
                chunk = os.read(ours, 65536)
            except OSError:  # The child closed its end of the terminal.
                break
            if not chunk:
                break
            sent += chunk
    os.close(ours)
    assert run.returncode == 0
    hide, show = b"\x1b[?25l", b"\x1b[?25h"
    assert (hide in sent) is is_screen
    assert sent.rfind(show) >= sent.rfind(hide)
    assert sent.endswith(b"after\r\n")
    assert (b"\x1b" in sent) is is_screen
