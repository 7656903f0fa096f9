"""The live view: a line per generation, and on a terminal, below it, how far the run is by now.

Names of metrics come from Envs: control characters and escape sequences in them are shown as text,
so no Env can recolour or garble the terminal. A display that fails (a closed pipe, an encoding
without these characters) is switched off with a warning; it never stops a run.
"""

import logging
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import chz
from rich.console import Console
from rich.live import Live
from rich.text import Text

from es_cookbook.common.terminal import plural, printable
from es_cookbook.population.sampler import Rollouts
from es_cookbook.runs.tracking.base import RunInfo, Tracker, TrackerBuilder
from es_cookbook.runs.tracking.findings import Findings
from es_cookbook.runs.tracking.jsonl import CORRECT, PASS_AT, REWARD, duration_in_words, reported

SPEEDS = {"throughput/answers_per_second": "answers/s", "throughput/tokens_per_second": "tokens/s"}
"""Speeds of a run; the first that was measured is shown."""
PROBLEMS = "test/problems"
"""Key of the number of held-out problems."""
_FIRST_PATIENCE, _PATIENCE = 10.0, 60.0
"""Seconds until rollouts in progress are reported on plain output, in the first generation and in
later ones."""
_COLUMNS = 100
"""Length of a line."""

logger = logging.getLogger(__name__)


@chz.chz
class LiveTrackerBuilder(TrackerBuilder):
    """Builds the live view: a line per generation, and on a terminal the progress of the run."""

    def __call__(self, run: RunInfo) -> Tracker:
        """Show progress on a terminal that can move its cursor, plain lines otherwise."""
        console = Console(highlight=False)
        is_redrawn = sys.stdout.isatty() and not console.is_dumb_terminal
        return LiveTracker(run, console if is_redrawn else None)


class LiveTracker(Tracker):
    """Prints a line per generation, and findings.

    On a terminal, `screen`, a last line is redrawn: generations, time, and rollouts in progress.
    Plain output gets a line about rollouts that take long, after twice the time each time.
    """

    def __init__(
        self,
        run: RunInfo,
        screen: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run, self._clock = run, clock
        self._began = self._ended = clock()
        self._done = run.start_generation
        self._findings = Findings()
        for row in run.measured:
            self._findings.take(row)
        self._logged: tuple[int, Mapping[str, float]] = 0, {}
        self._is_on = True
        self._told: tuple[Rollouts | None, float] = None, 0.0
        """Rollouts that were reported last, and the seconds of their next report."""
        self._is_closed = threading.Event()
        self._watch = threading.Thread(target=self._look_on, name="underway", daemon=True)
        self._live: Live | None = None
        if screen is None:
            self._watch.start()
            return
        self._live = Live(
            get_renderable=lambda: Text(self._progress(), "dim", no_wrap=True, overflow="ellipsis"),
            console=screen,
            refresh_per_second=2,
            transient=True,
        )
        self._live.start()

    def log(self, generation: int, metrics: Mapping[str, float]) -> None:
        self._logged = generation, metrics

    def recorded(self, generations: int) -> None:
        """Print the line of a generation, and findings."""
        (generation, metrics), total = self._logged, self._run.num_generations
        which, left = "finished", ""
        if generation < total:
            self._done, self._ended = generation + 1, self._clock()
            which = f"generation {generation + 1}/{total}"
            left = f"{duration(self._seconds_left())} left"
        found = [f"{which}: {sentence}" for sentence in self._findings.take(metrics)]
        self._print("\n".join([line_of(which, metrics, left), *found]))

    def close(self) -> None:
        """Restore the terminal; closing twice is harmless."""
        self._is_closed.set()
        if self._watch.is_alive():
            self._watch.join()
        if self._live is not None:
            self._try(self._live.stop)

    def look(self) -> None:
        """Report on the rollouts in progress, if they have taken long since the last report."""
        now, (before, due) = self._run.underway.rollouts, self._told
        if now is None or now.is_over:
            return
        if now is not before:
            due = _FIRST_PATIENCE if self._done == self._run.start_generation else _PATIENCE
        if now.seconds >= due:
            self._print(so_far(now, self._run.num_generations))
            due = 2 * max(due, now.seconds)
        self._told = now, due

    def _look_on(self) -> None:
        while not self._is_closed.wait(1.0):
            self.look()

    def _seconds_left(self) -> float:
        """Estimate it by this process's mean time per generation, evaluations included; or NaN."""
        done = self._done - self._run.start_generation
        if not done:
            return math.nan
        each = (self._ended - self._began) / done
        left = each * (self._run.num_generations - self._done)
        return max(0.0, left - (self._clock() - self._ended))

    def _progress(self) -> str:
        elapsed, left = self._clock() - self._began, self._seconds_left()
        facts = [
            f"{self._done}/{plural(self._run.num_generations, 'generation')}",
            f"{duration(elapsed)} elapsed, {duration(left)} left",
        ]
        now = self._run.underway.rollouts
        if now is not None and not now.is_over:
            facts.append(so_far(now, self._run.num_generations))
        return "  ·  ".join(facts)

    def _print(self, text: str) -> None:
        live, shown = self._live, printable(text)
        if live is None:  # At once, whichever thread it is.
            self._try(lambda: print(f"{shown}\n", end="", flush=True))
        else:
            self._try(lambda: live.console.print(Text(shown), soft_wrap=True))

    def _try(self, show: Callable[[], None]) -> None:
        if not self._is_on:
            return
        try:
            show()
        except (OSError, UnicodeError, ValueError) as error:
            self._is_on = False
            logger.warning("the live view is off: standard output failed (%s)", error)


def line_of(which: str, metrics: Mapping[str, float], left: str = "") -> str:
    """Return a generation as a line of at most `_COLUMNS` columns, without facts that do not fit.

    >>> line_of("finished", {"reward/mean": 0.25, "test/reward/mean": 0.5, "test/problems": 40.0})
    'finished  reward 0.250  held-out reward 0.500  40 held-out problems'
    >>> line_of("generation 1/9", {"env/all/correct": 0.9, "reported/env/all/correct": 29.0})
    'generation 1/9  correct 0.900 (of 29 answers)'
    """
    line, end = which, f"  {left}" if left else ""
    main = ("reward/mean", "env/all/correct", CORRECT, REWARD, "objective/mean")
    passed = [key for key in metrics if key.startswith(PASS_AT)]
    envs = [k for k in metrics if k.startswith(("env/all/", "test/env/all/")) and metrics[k]]
    facts = [*_shown(metrics, (*main, *passed)), *pace(metrics)]
    if PROBLEMS in metrics:
        facts.append(plural(round(metrics[PROBLEMS]), "held-out problem"))
    facts += _shown(metrics, [key for key in envs if key not in main])
    for fact in facts:
        if len(line) + 2 + len(fact) + len(end) <= _COLUMNS:
            line += f"  {fact}"
    return line + end


def _shown(metrics: Mapping[str, float], keys: Sequence[str]) -> Iterator[str]:
    """Return the measured metrics as text, with their intervals."""
    for key in keys:
        if key in metrics:
            sure = ", ".join(filter(None, (reported(metrics, key), interval(metrics, key))))
            yield f"{label(key)} {metrics[key]:.3f}{f' ({sure})' if sure else ''}"


def pace(metrics: Mapping[str, float]) -> list[str]:
    """Return the speed, the length and the cut share of a generation's answers as texts.

    >>> pace({"throughput/answers_per_second": 46.4, "rollouts/mean_tokens": 11.8})
    ['46 answers/s', '12 tokens an answer']
    """
    found: list[str] = []
    if metrics.get("rollouts/truncated", 0) > 0:
        found.append(f"{metrics['rollouts/truncated']:.0%} of answers cut")
    if speed := next((key for key in SPEEDS if key in metrics), None):
        found.append(f"{compact(metrics[speed])} {SPEEDS[speed]}")
    if "rollouts/mean_tokens" in metrics:
        found.append(f"{metrics['rollouts/mean_tokens']:.0f} tokens an answer")
    return found


def so_far(now: Rollouts, of: int) -> str:
    """Describe rollouts in progress: number done, mean reward, time left."""
    what = "held-out" if now.generation is None else f"generation {now.generation + 1}/{of}"
    done = f"{now.num_done:,}" if now.num_done else "none"
    found = [f"{done} of {plural(now.count, 'answer')} after {duration_in_words(now.seconds)}"]
    if not math.isnan(now.mean_reward):
        found.append(f"reward {number(now.mean_reward)}")
    if now.num_lost:
        found.append(f"{now.num_lost:,} lost")
    if not math.isnan(now.seconds_left):
        found.append(f"about {duration_in_words(now.seconds_left)} left")
    return f"{what}: {', '.join(found)}"


def interval(metrics: Mapping[str, float], key: str) -> str:
    """Return the 95 % interval of a held-out mean as text; "" if it was not measured.

    >>> interval({"test/low/reward/mean": 0.1, "test/high/reward/mean": 0.35}, "test/reward/mean")
    '0.100 to 0.350'
    """
    head, _, rest = key.partition("/")
    low, high = (metrics.get(f"test/{end}/{rest}", math.nan) for end in ("low", "high"))
    # If all problems have the same value, a bootstrap cannot tell.
    return f"{number(low)} to {number(high)}" if head == "test" and low < high else ""


def label(key: str) -> str:
    """Return a short label for a metric's key.

    >>> label("test/env/all/correct"), label("reward/max_genome"), label("env/all/format")
    ('held-out correct', 'best genome', 'format')
    >>> label("test/pass@4"), label("objective/mean")
    ('held-out pass@4', 'objective')
    """
    names = {
        "reward/mean": "reward",
        "reward/max_genome": "best genome",
        "objective/mean": "objective",
        "test/reward/mean": "held-out reward",
        **SPEEDS,
    }
    plain = key.removeprefix("test/").removeprefix("env/all/")
    return printable(names.get(key, f"held-out {plain}" if key.startswith("test/") else plain))


def number(value: float) -> str:
    """Format a measured value with a useful number of digits.

    >>> number(0.58249), number(-212.34), number(1_234_567.0), number(math.nan)
    ('0.582', '-212.3', '1.2M', 'nan')
    """
    size = abs(value)
    return compact(value) if size >= 1e5 else f"{value:.1f}" if size >= 100 else f"{value:.3f}"


def duration(seconds: float) -> str:
    """Format seconds as a clock.

    >>> duration(65), duration(3_725), duration(math.nan)
    ('1:05', '1:02:05', '-:--')
    """
    if not abs(seconds) < 1e10:
        return "-:--"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def compact(number: float) -> str:
    """Format a count in about five characters.

    >>> compact(950), compact(12_345), compact(3_210_000), compact(-1.7e308)
    ('950', '12.3k', '3.2M', '-1.7e+308')
    """
    if abs(number) >= 1e15:
        return f"{number:.1e}"
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.1f}{unit}"
    return f"{number:.0f}"
