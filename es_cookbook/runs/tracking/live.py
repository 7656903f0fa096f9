"""The live view: one screen in a terminal, one plain line per generation anywhere else.

Text from a model or an Env is data: it is never read as Rich markup, and control characters, escape
sequences and direction overrides in it are shown as text, so no answer can recolour or garble the
terminal. A display that fails (a closed pipe, an encoding without these characters) is switched
off with a warning; it never stops a run.
"""

import itertools
import logging
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import chz
from rich.cells import chop_cells
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.measure import Measurement
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from es_cookbook.common.checks import check_range
from es_cookbook.common.terminal import done_saying, is_screen, plural, printable
from es_cookbook.population.underway import Rollouts
from es_cookbook.rl.types import Trajectory, TrajectoryGroup
from es_cookbook.runs.tracking.base import Decode, RunInfo, Tracker, TrackerBuilder, choose_rollouts
from es_cookbook.runs.tracking.findings import Findings
from es_cookbook.runs.tracking.jsonl import PASS_AT, read_metrics, reported_key
from es_cookbook.runs.tracking.remaining import Remaining
from es_cookbook.runs.tracking.result import duration_in_words

SPEEDS = {
    "throughput/answers_per_second": "answers/s",
    "throughput/tokens_per_second": "tokens/s",
}
"""How fast a run is: the first of them that it has; those of old have tokens alone."""
PROBLEMS = "test/problems"
"""How many held-out problems the centre was measured on."""
_FIRST_PATIENCE, _PATIENCE = 10.0, 60.0
"""Seconds after which rollouts in progress are told of: of the first generation, and of later ones.
"""
_COLUMNS = 100
"""Of a generation's line."""
_BARS = "▁▂▃▄▅▆▇█"
_TREND = 24
"""Columns of a trend, where there are as many."""

logger = logging.getLogger(__name__)


@chz.chz
class LiveTrackerBuilder(TrackerBuilder):
    """Builds the live view that suits standard output."""

    rollout_lines: int = chz.field(
        default=6, doc="lines of one sampled rollout shown below the numbers; 0 shows none"
    )

    @chz.validate
    def _ranges(self) -> None:
        check_range(self, "rollout_lines", at_least=0)

    def __call__(self, run: RunInfo) -> Tracker:
        """A screen on a terminal that can move its cursor, plain lines otherwise."""
        if is_screen(sys.stdout):
            return ScreenTracker(run, self.rollout_lines, Console(highlight=False))
        return PlainTracker(run)


class PlainTracker(Tracker):
    """One line per generation on standard output: for logs, pipes and dumb terminals.

    What takes long is told of meanwhile, twice as late each time.
    """

    def __init__(self, run: RunInfo, clock: Callable[[], float] = time.monotonic) -> None:
        self._run = run
        self._remaining = Remaining(run, clock)
        self._findings = Findings()
        self._logged: tuple[int, Mapping[str, float]] = 0, {}
        for metrics in read_metrics(run.path / "metrics.jsonl"):
            self._findings.take(metrics)
        self._length = run.num_generations
        self._on = True
        self._is_closed = threading.Event()
        self._told: tuple[Rollouts | None, float] = None, 0.0
        """What was told of last, and after how many seconds it will be again."""
        self._patience = _FIRST_PATIENCE
        self._watch = threading.Thread(target=self._look_on, name="underway", daemon=True)
        self._watch.start()

    def log(self, generation: int, metrics: Mapping[str, float]) -> None:
        self._logged = generation, metrics

    def recorded(self, generations: int) -> None:
        """Print the line, and what there is to say about it."""
        generation, metrics = self._logged
        total = self._run.num_generations
        last = generation >= total
        if not last:
            self._remaining.finished(generation)
        self._patience = _PATIENCE
        which = "finished" if last else f"generation {generation + 1}/{total}"
        left = "" if last else f"{duration(self._remaining.seconds)} left"
        lines = [line_of(which, metrics, left)]
        if total != self._length:
            lines.append(f"{total} generations in place of {self._length} take the time of the run")
            self._length = total
        if not last and (said := self._remaining.told):
            lines.append(said)
        lines += [f"{which}: {sentence}" for _, sentence in self._findings.take(metrics)]
        self._print(lines)

    def close(self) -> None:
        """Stop looking on."""
        self._is_closed.set()
        self._watch.join()

    def look(self) -> None:
        """Tell of the rollouts in progress, if they have taken long since they were told of."""
        now, (before, due) = self._run.underway.rollouts, self._told
        if now is None or now.is_over:
            return
        if now is not before:
            due = self._patience
        if now.seconds >= due:
            self._print([f"{self._what(now)}: {', '.join(so_far(now))}"])
            due = 2 * max(due, now.seconds)
        self._told = now, due

    def _what(self, now: Rollouts) -> str:
        if now.generation is None:
            return "held-out problems"
        return f"generation {now.generation + 1}/{self._run.num_generations}"

    def _look_on(self) -> None:
        while not self._is_closed.wait(1.0):
            self.look()

    def _print(self, lines: Sequence[str]) -> None:
        if not self._on:
            return
        try:  # At once, whichever thread it is.
            print(printable("\n".join(filter(None, lines))) + "\n", end="", flush=True)
        except (OSError, UnicodeError, ValueError) as error:
            self._on = False
            logger.warning("the live view is off: standard output failed (%s)", error)


class ScreenTracker(Tracker):
    """Progress bar, numbers with their trend, and one sampled rollout, redrawn in place."""

    def __init__(
        self,
        run: RunInfo,
        rollout_lines: int,
        console: Console,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run = run
        self._remaining = Remaining(run, clock)
        self._findings = Findings()
        self._rollout_lines = rollout_lines
        self._generation = 0
        self._courses: dict[str, _Course] = {}
        self._intervals: dict[str, str] = {}
        self._last_two: list[Mapping[str, float]] = []
        for metrics in read_metrics(run.path / "metrics.jsonl"):
            self._take(metrics)
        self._numbers = self._draw_numbers()
        self._rollout: RenderableType = Text()
        self._live = Live(
            get_renderable=self._render, console=console, refresh_per_second=4, transient=False
        )
        done_saying()  # The clock of this view shows that something happens.
        self._live.start()

    def log(self, generation: int, metrics: Mapping[str, float]) -> None:
        self._generation = generation
        self._take(dict(metrics))

    def recorded(self, generations: int) -> None:
        if self._generation < self._run.num_generations:
            self._remaining.finished(self._generation)
        self._numbers = self._draw_numbers()
        self._try(self._live.refresh)

    def log_rollouts(
        self, generation: int, groups_P: Sequence[TrajectoryGroup], decode: Decode
    ) -> None:
        for sampled in choose_rollouts(self._run.run_seed, generation, groups_P, 1):
            if self._rollout_lines and isinstance(sampled.rollout, Trajectory):
                action = sampled.rollout.transitions[-1].action.text
                title = (
                    f"an answer, reward {sampled.reward:.2f}: generation {generation + 1}, "
                    f"problem {sampled.problem}, genome {sampled.genome}"
                )
                # Not the whole width: the terminal's own ^C at the end of a full line would break
                # it and leave the cursor a line lower than Rich believes.
                width = max(self._live.console.width - 6, 20)
                self._rollout = Panel(
                    Text("\n".join(folded(action.strip(), width - 4, self._rollout_lines))),
                    width=width,
                    title=Text(title, style="dim", overflow="ellipsis"),
                    title_align="left",
                    border_style="dim",
                )

    def close(self) -> None:
        """Leave the last picture on the screen and release the terminal."""
        self._try(self._live.stop)

    def _try(self, draw: Callable[[], None]) -> None:
        try:
            draw()
        except (OSError, UnicodeError) as error:
            logger.warning("the live view stopped: the terminal failed (%s)", error)

    def _render(self) -> RenderableType:
        remaining, total = self._remaining, self._run.num_generations
        done = remaining.done
        head = Table.grid(padding=(0, 2))
        head.add_column(no_wrap=True)
        head.add_column(max_width=32)
        for _ in range(3):
            head.add_column(no_wrap=True)
        head.add_row(
            Text("generation", style="bold"),
            ProgressBar(total=max(total, 1), completed=done),
            Text(f"{done}/{total}", style="bold"),
            Text(f"{duration(remaining.elapsed)} elapsed", style="dim"),
            Text(f"{duration(remaining.seconds)} left", style="cyan"),
        )
        return Group(head, *self._draw_underway(), self._numbers, self._rollout)

    def _draw_underway(self) -> list[RenderableType]:
        now, whole = self._run.underway.rollouts, self._remaining.whole
        facts = [f"about {whole} in all"] if whole else []
        if now is not None and not now.is_over:
            what = "held-out" if now.generation is None else f"generation {now.generation + 1}"
            facts = [what, *so_far(now), *facts]
        return [Text("  ·  ".join(facts), "dim")] if facts else []

    def _take(self, metrics: Mapping[str, float]) -> None:
        self._last_two = [*self._last_two[-1:], metrics]
        self._findings.take(metrics)
        for key, value in shown(metrics).items():
            self._courses.setdefault(key, _Course()).add(value)
            sure = ", ".join(filter(None, (interval(metrics, key), reported(metrics, key))))
            self._intervals[key] = sure

    def _draw_numbers(self) -> RenderableType:
        if not self._last_two:
            return Text()
        table = Table(box=None, padding=(0, 1), pad_edge=False, header_style="dim")
        table.add_column("")
        for column in ("first", "max", "now"):
            table.add_column(column, justify="right", no_wrap=True, min_width=5)
        if any(self._intervals.values()):
            table.add_column("95 %", no_wrap=True)
        table.add_column("trend")
        for key, course in self._courses.items():
            if not course.largest and _counts_events(key):
                continue
            held_out = key.startswith("test/")
            table.add_row(
                Text(label(key), "bold" if held_out else "", no_wrap=True, overflow="ellipsis"),
                number(course.first),
                number(course.largest),
                Text(number(course.last), style="bold green" if held_out else "bold"),
                *([self._intervals[key]] if any(self._intervals.values()) else []),
                _Trend(course.means, "green" if held_out else "cyan"),
            )
        latest: dict[str, float] = {}
        for row in self._last_two:  # The last evaluation's line has no speed of its own.
            latest |= row
        facts = [*pace(latest)]
        if "progress/tokens" in latest:
            facts.append(f"{compact(latest['progress/tokens'])} tokens so far")
        if PROBLEMS in latest:
            facts.append(plural(round(latest[PROBLEMS]), "held-out problem"))
        if "genomes/tied_fraction" in latest:
            facts.append(f"{latest['genomes/tied_fraction']:.0%} of pairs tied")
        if latest.get("rollouts/failed", 0) > 0:
            facts.append(f"{plural(round(latest['rollouts/failed']), 'rollout')} lost")
        said = [Text(printable(sentence), "yellow") for _, sentence in self._findings.latest]
        return Group(table, Text("  ·  ".join(facts), style="dim"), *said)


def line_of(which: str, metrics: Mapping[str, float], left: str = "") -> str:
    """A generation in a line of at most `_COLUMNS` columns; what tells least is left out.

    >>> line_of("finished", {"reward/mean": 0.25, "test/reward/mean": 0.5, "test/problems": 40.0})
    'finished  reward 0.250  held-out reward 0.500  40 held-out problems'
    """
    paced = [(2 if text.endswith("cut") else 4, text) for text in pace(metrics)]
    facts = [(0, which), *_measured(metrics)]
    if PROBLEMS in metrics:
        facts.append((5, plural(round(metrics[PROBLEMS]), "held-out problem")))
    facts += [*paced, (0, left)]
    while len(line := "  ".join(text for _, text in facts if text)) > _COLUMNS:
        least, at = max((rank, at) for at, (rank, _) in enumerate(facts))
        if not least:
            break
        del facts[at]
    return line


def _measured(metrics: Mapping[str, float]) -> Iterator[tuple[int, str]]:
    """What rollouts and the held-out problems came to, and how sure that is; 0 tells the most."""
    metric = "env/all/correct" if "test/env/all/correct" in metrics else "reward/mean"
    ranks = {f"test/{metric}": 0, "reward/mean": 1, "env/all/correct": 1, "objective/mean": 3}
    ranks |= {"test/reward/mean": 2, "reward/max_genome": 5} | ranks
    for key, value in shown(metrics, zeros=False).items():
        sure = ", ".join(filter(None, (reported(metrics, key), interval(metrics, key))))
        rank = ranks.get(key, 2 if key.startswith(PASS_AT) else 6)
        yield rank, f"{label(key)} {value:.3f}{f' ({sure})' if sure else ''}"


def pace(metrics: Mapping[str, float]) -> list[str]:
    """How fast a generation answered, how long its answers were, and how many were cut.

    >>> pace({"throughput/answers_per_second": 46.4, "rollouts/mean_tokens": 11.8})
    ['46 answers/s', '12 tokens an answer']
    >>> pace({"throughput/tokens_per_second": 12_345.0, "rollouts/truncated": 0.5})
    ['12.3k tokens/s', '50% of answers cut']
    """
    found: list[str] = []
    if speed := next((key for key in SPEEDS if key in metrics), None):
        found.append(f"{compact(metrics[speed])} {SPEEDS[speed]}")
    if "rollouts/mean_tokens" in metrics:
        found.append(f"{metrics['rollouts/mean_tokens']:.0f} tokens an answer")
    if metrics.get("rollouts/truncated", 0) > 0:
        found.append(f"{metrics['rollouts/truncated']:.0%} of answers cut")
    return found


def so_far(now: Rollouts) -> list[str]:
    """What rollouts in progress have brought: how many, what they earned, how long they take."""
    done = f"{now.num_done:,}" if now.num_done else "none"
    found = [f"{done} of {plural(now.count, 'answer')} after {duration_in_words(now.seconds)}"]
    if not now.num_done and now.num_tokens:
        found.append(f"{compact(now.num_tokens)} tokens")
    if not math.isnan(now.mean_reward):
        found.append(f"reward {number(now.mean_reward)}")
    if now.num_lost:
        found.append(f"{now.num_lost:,} lost")
    if not math.isnan(now.seconds_left):
        found.append(f"about {duration_in_words(now.seconds_left)} left")
    return found


_COUNTS = ("tool_calls", "tool_errors", "malformed_calls", "turn_limit", "context_limit")
"""What every Env of several turns counts, whether or not it ever happens."""


def shown(metrics: Mapping[str, float], *, zeros: bool = True) -> dict[str, float]:
    """The metrics to show: rewards, the objective, the Envs' means, held-out ones.

    Without `zeros` those are left out that count what did not happen.
    """
    first = ("reward/mean", "reward/max_genome", "objective/mean")
    keys = [key for key in first if key in metrics]
    for prefix in ("env/all/", "test/reward/mean", "test/env/all/", PASS_AT):
        keys += [key for key in metrics if key.startswith(prefix)]
    return {key: metrics[key] for key in keys if zeros or metrics[key] or not _counts_events(key)}


def _counts_events(key: str) -> bool:
    return key.rpartition("/")[2] in _COUNTS


def reported(metrics: Mapping[str, float], key: str) -> str:
    """Over how many answers a mean is, where it is not over all of them; else empty.

    >>> reported({"env/all/correct": 0.9, "reported/env/all/correct": 29.0}, "env/all/correct")
    'of 29 answers'
    """
    count = metrics.get(reported_key(key))
    return "" if count is None else f"of {plural(round(count), 'answer')}"


def interval(metrics: Mapping[str, float], key: str) -> str:
    """Where a held-out mean lies with a confidence of 95 %; empty where that was not measured.

    >>> interval({"test/low/reward/mean": 0.1, "test/high/reward/mean": 0.35}, "test/reward/mean")
    '0.100 to 0.350'
    """
    if not key.startswith("test/"):
        return ""
    rest = key.removeprefix("test/")
    low, high = (metrics.get(f"test/{end}/{rest}", math.nan) for end in ("low", "high"))
    # Where all problems have the same value, a bootstrap cannot tell.
    return f"{number(low)} to {number(high)}" if low < high else ""


def label(key: str) -> str:
    """A short label for a metric's key.

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
    """A measured value with as many digits as tell.

    >>> number(0.58249), number(-212.34), number(1_234_567.0), number(math.nan)
    ('0.582', '-212.3', '1.2M', 'nan')
    """
    size = abs(value)
    return compact(value) if size >= 1e5 else f"{value:.1f}" if size >= 100 else f"{value:.3f}"


def duration(seconds: float) -> str:
    """Seconds as a clock.

    >>> duration(65), duration(3_725), duration(math.nan)
    ('1:05', '1:02:05', '-:--')
    """
    if not abs(seconds) < 1e10:
        return "-:--"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def compact(number: float) -> str:
    """A count in at most five characters or so.

    >>> compact(950), compact(12_345), compact(3_210_000), compact(-1.7e308)
    ('950', '12.3k', '3.2M', '-1.7e+308')
    """
    if abs(number) >= 1e15:
        return f"{number:.1e}"
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.1f}{unit}"
    return f"{number:.0f}"


def folded(text: str, width: int, most: int) -> list[str]:
    r"""Text that a terminal shows and never obeys, as at most so many lines of so many columns.

    >>> folded("a long answer\n\x1b[2J", 6, 9)
    ['a long', 'answer', '\\x1b[2', 'J']
    >>> folded("one\ntwo\nthree", 20, 2)
    ['one', 'two … and more']
    """
    # Of no line can be shown more than this, however long the text is.
    shown_text = text[: most * (width + 1)]
    wrapped = Text(printable(shown_text)).wrap(Console(width=width), width, overflow="fold")
    rows = [line.plain for line in wrapped]
    if len(rows) <= most and shown_text == text:
        return rows
    more = " … and more"
    *kept, last = rows[:most] or [""]
    return [*kept, chop_cells(f"{last} ", max(width - len(more), 1))[0].rstrip() + more]


class _Course:
    """How a metric went, in as little memory after a million generations as after a hundred.

    Attributes:
        first: its first finite value, NaN while there is none; `largest`: of the finite ones.
        last: its last value, finite or not.
    """

    def __init__(self) -> None:
        self.first = self.largest = self.last = math.nan
        self._stretch = 1
        """Values that a sum is of, at most; a power of two."""
        self._sums: list[tuple[float, int]] = []

    def add(self, value: float) -> None:
        self.last = value
        if not math.isfinite(value):
            return
        if math.isnan(self.first):
            self.first = self.largest = value
        self.largest = max(self.largest, value)
        if self._sums and self._sums[-1][1] < self._stretch:
            total, count = self._sums[-1]
            self._sums[-1] = total + value, count + 1
            return
        if len(self._sums) == 4 * _TREND:
            pairs = zip(self._sums[::2], self._sums[1::2], strict=True)
            self._sums = [(a + b, m + n) for (a, m), (b, n) in pairs]
            self._stretch *= 2
        self._sums.append((value, 1))

    @property
    def means(self) -> list[float]:
        """Means of its stretches, in order, of one length but for the last; NaN without any."""
        return [total / count for total, count in self._sums] or [math.nan]


class _Trend:
    """A series as bars, in as many columns as there are."""

    def __init__(self, values: Sequence[float], style: str) -> None:
        self._values = values
        self._style = style

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(sparkline(self._values, min(options.max_width, _TREND)), self._style)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(1, min(len(self._values), _TREND, options.max_width))


def sparkline(values: Sequence[float], width: int = _TREND) -> str:
    """A series as bars between its own minimum and maximum, the mean of each stretch.

    >>> sparkline([0, 1, 2, 3])
    '▁▃▆█'
    """
    count = min(width, len(values))
    edges = [i * len(values) // count for i in range(count + 1)]
    means = [sum(values[start:end]) / (end - start) for start, end in itertools.pairwise(edges)]
    low, high = min(means), max(means)
    is_flat = math.isclose(low, high, rel_tol=1e-9)  # Means of equal numbers differ by rounding.
    scale = 0.0 if is_flat else (len(_BARS) - 1) / (high - low)
    return "".join(_BARS[round((mean - low) * scale)] for mean in means)
