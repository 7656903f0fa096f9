import contextlib
import io
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console

from es_cookbook.runs.tracking.base import RunInfo
from es_cookbook.runs.tracking.live import LiveTracker, line_of

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


def told(tracker: LiveTracker, clock: Clock, rows: Sequence[Mapping[str, float]]) -> None:
    """Tell a tracker of these generations, of ten seconds each unless they say which."""
    for number, row in enumerate(rows):
        clock.now += 10.0
        generation = round(row.get("progress/generation", number))
        tracker.log(generation, row)
        tracker.recorded(generation + 1)
    tracker.close()
    tracker.close()


def plain(path: Path, *rows: Mapping[str, float], start: int = 0) -> list[str]:
    """The lines of a run with these metrics."""
    clock, out = Clock(), io.StringIO()
    with contextlib.redirect_stdout(out):
        told(LiveTracker(info(path, start), clock=clock), clock, rows)
    return out.getvalue().splitlines()


def drawn(path: Path, *rows: Mapping[str, float], start: int = 0) -> str:
    """What a terminal of 100 columns is sent for these generations."""
    clock, sent = Clock(), io.StringIO()
    console = Console(file=sent, force_terminal=True, width=100, height=40, highlight=False)
    told(LiveTracker(info(path, start), console, clock), clock, rows)
    return sent.getvalue()


def test_a_line_tells_a_generation(tmp_path: Path) -> None:
    last = {"progress/generation": 10, "test/env/all/correct": 0.655}
    assert plain(tmp_path, METRICS, METRICS, last) == [
        "generation 1/10  reward 0.400  correct 0.250  46 answers/s  1:30 left",
        "generation 2/10  reward 0.400  correct 0.250  46 answers/s  1:20 left",
        "finished  held-out correct 0.655",
    ]


def test_a_terminal_has_the_same_lines_and_below_them_how_far_the_run_is(tmp_path: Path) -> None:
    sent = drawn(tmp_path, METRICS)
    assert "generation 1/10  reward 0.400  correct 0.250  46 answers/s  1:30 left" in sent
    assert "1/10 generations  ·  0:10 elapsed, 1:30 left" in sent
    assert sent.rfind("\x1b[?25h") > sent.rfind("\x1b[?25l"), "the cursor is given back"


def test_what_goes_wrong_is_told_once(tmp_path: Path) -> None:
    cut = {"reward/mean": 0.4, "rollouts/mean_tokens": 30.0, "rollouts/truncated": 0.5}
    first, finding, second = plain(tmp_path, cut, cut)
    assert first.startswith("generation 1/10  ") and second.startswith("generation 2/10  ")
    assert "50% of answers cut  30 tokens an answer" in first
    assert finding == (
        "generation 1/10: 50% of the answers were cut off at sampling.max_tokens: raise it, or ask "
        "for shorter answers"
    )


def test_a_line_has_a_hundred_columns_and_what_tells_most(tmp_path: Path) -> None:
    metrics = {
        "reward/mean": 0.4,
        **{f"env/all/part_{number}": 0.5 for number in range(9)},
        "env/all/correct": 0.3,
        "test/env/all/correct": 0.25,
        "test/low/env/all/correct": 0.2,
        "test/high/env/all/correct": 0.3,
        "test/problems": 500.0,
    }
    (line, *_) = plain(tmp_path, metrics)
    assert line == (
        "generation 1/10  reward 0.400  correct 0.300  held-out correct 0.250 (0.200 to 0.300)  "
        "1:30 left"
    )
    assert len(line_of(f"generation {'1' * 100}", metrics)) > 100, "what has to be said is said"


def test_no_metric_of_an_env_can_paint_on_the_terminal(tmp_path: Path) -> None:
    hostile = {"env/all/[red]x\x1b[2J\x1b]0;title\x07\u202egnp": 1.0}
    for sent in ("\n".join(plain(tmp_path, hostile)), drawn(tmp_path, hostile)):
        for sequence in ("\x1b[2J", "\x1b]0;", "\x07", "\u202e"):
            assert sequence not in sent
        assert r"[red]x\x1b[2J" in sent, "markup stays text"


def test_time_left_counts_only_what_this_process_has_run(tmp_path: Path) -> None:
    rows = [{"progress/generation": generation} for generation in (6, 7, 8, 9)]
    assert plain(tmp_path, *rows, start=6) == [
        f"generation {generation + 1}/10  0:{10 * (9 - generation):02d} left"
        for generation in (6, 7, 8, 9)
    ]


def test_a_resumed_run_does_not_repeat_what_was_told(tmp_path: Path) -> None:
    cut = {"reward/mean": 0.4, "rollouts/truncated": 0.5}
    run, out = info(tmp_path, 1), io.StringIO()
    run.measured = [cut]
    with contextlib.redirect_stdout(out):
        told(LiveTracker(run, clock=Clock()), Clock(), [cut])
    assert len(out.getvalue().splitlines()) == 1
