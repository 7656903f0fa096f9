"""Records what a generation measured, in this order.

Rollouts and metrics first, then the state to resume from (a line of the history, a checkpoint). A
generation counts once that is on the disk; only then do trackers show it, take a snapshot of it or
push it. Everything before that is written again after a crash.
"""

import dataclasses
import math
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import cast

import anyio
import numpy as np

from es_cookbook.common.errors import HistoryError
from es_cookbook.common.machine.spans import NO_SPANS, Spans
from es_cookbook.common.terminal import say
from es_cookbook.engines.base import Engine
from es_cookbook.evolution.genome import OffsetsRule, Step
from es_cookbook.population.sampler import Seconds
from es_cookbook.rl.rollouts import count_answers, count_tokens, lost_rollouts
from es_cookbook.rl.types import RLDataset, TrajectoryGroup
from es_cookbook.runs.config import RunConfig
from es_cookbook.runs.tracking.base import Decode, Tracker
from es_cookbook.runs.tracking.live import line_of

LOOP = "loop"
"""The track of the loop in a profile."""
_TIMES = ("answer", "ask", "load", "sample", "score", "tell", "learn", "apply")
"""Times in `metrics.jsonl`, as `time/...`."""
_LONG = 3.0
"""Seconds of the first evaluation from which its result is printed at once."""


class Progress:
    """Rollouts and tokens of a run so far, and the distance of its centre from the base.

    Args:
        last: the last row of metrics of a resumed run; empty for a new one.

    Raises:
        HistoryError: The row does not count rollouts.
    """

    def __init__(self, last: Mapping[str, float]) -> None:
        counts = [last.get(key, 0) for key in ("progress/rollouts", "progress/tokens")]
        if any(math.isnan(count) for count in counts):
            raise HistoryError("metrics.jsonl is damaged: its last line does not count rollouts")
        self._rollouts, self._tokens = map(int, counts)
        self._recent: tuple[dict[int, float], dict[int, float]] = {}, {}
        """Seed of the last step but one, and of the last -> its coefficient in the centre."""
        self._earlier_squared = 0.0
        """Mean square of the part of the centre that comes from other seeds."""
        self._has_moved = False

    def moved(self, step: Step) -> None:
        """Count a step of evolution strategies."""
        self._has_moved = True
        if isinstance(step.rule, OffsetsRule):  # The centre is there, wherever it was.
            squares = np.square(step.rule.offsets.array, dtype=np.float64)
            self._recent, self._earlier_squared = ({}, {}), float(squares.mean())
            return
        kept = 1 - step.decay
        before, last = ({seed: kept * c for seed, c in each.items()} for each in self._recent)
        latest: dict[int, float] = {}
        self._earlier_squared *= kept * kept
        if step.rule is None:
            # A seed of a previous step continues in its direction: of the last one in momentum's
            # window, of the last but one with sharpness in between.
            for term in step.terms:
                known = next((each for each in (latest, last, before) if term.seed in each), {})
                latest[term.seed] = known.pop(term.seed, 0.0) + term.coefficient
        else:
            self._earlier_squared += step.rms**2
        self._earlier_squared += _squared(before)
        self._recent = last, latest

    def rolled_out(self, groups_P: Sequence[TrajectoryGroup]) -> None:
        """Count rollouts and their tokens."""
        self._rollouts += sum(len(ks) for group in groups_P for ks in group.trajectories_G_K)
        self._tokens += count_tokens(groups_P)

    def metrics(self) -> Mapping[str, float]:
        """Return `progress/rollouts`, `progress/tokens` and `centre/drift_rms`.

        The drift is measured over the search space.

        The drift is that of a parameter that all terms perturb. If the search space scales or masks
        noise, and steps are plain sums of terms, a parameter with factor f on sigma has f times it,
        one outside the mask has none, and each of n blocks has 1 / √n of it. Steps by a rule
        (Adam's, Muon's) count as independent of each other, so if one continues in the direction of
        the last, the drift is larger than this.
        """
        counted = {"progress/rollouts": self._rollouts, "progress/tokens": self._tokens}
        if not self._has_moved:
            return counted
        squared = self._earlier_squared + sum(map(_squared, self._recent))
        return {**counted, "centre/drift_rms": math.sqrt(squared)}


def _squared(coefficients: Mapping[int, float]) -> float:
    """Return the mean square of a sum of noise; different seeds are independent."""
    return math.fsum(value * value for value in coefficients.values())


@dataclasses.dataclass(eq=False, kw_only=True)
class Recorder:
    """Measures and records the generations of a run of any kind.

    Attributes:
        tracker: receives metrics and rollouts.
        progress: rollouts and tokens so far.
        evaluate: measures the model on held-out problems: metrics `test/...`.
        spans: spans of the profile.
        evaluated: held-out metrics of the model that the current generation starts from.
    """

    config: RunConfig
    engine: Engine
    dataset: RLDataset
    tracker: Tracker
    progress: Progress
    evaluate: Callable[[], Awaitable[Mapping[str, float]]]
    spans: Spans = NO_SPANS
    evaluated: Mapping[str, float] = dataclasses.field(default_factory=dict[str, float], init=False)
    _began: float = dataclasses.field(default=0.0, init=False)
    _stats: Mapping[str, float] = dataclasses.field(default_factory=dict[str, float], init=False)
    _restarted: float = dataclasses.field(default=0.0, init=False)
    _seconds: dict[int, dict[str, float]] = dataclasses.field(
        default_factory=lambda: defaultdict(dict), init=False
    )

    @contextmanager
    def timed(self, generation: int, name: str) -> Generator[None]:
        """Record the time spent in the block as that of `name` in a generation."""
        began = time.perf_counter()
        yield
        self.took(generation, name, began, time.perf_counter())

    def took(self, generation: int, name: str, began: float, ended: float) -> None:
        """Record that `name` was done between two moments of `time.perf_counter`."""
        self._seconds[generation][name] = ended - began
        self.spans.add(LOOP, name, began, ended)

    def rolled_out(self, generation: int, seconds: Seconds) -> None:
        """Record the times of a generation's rollouts."""
        self._seconds[generation] |= dataclasses.asdict(seconds)

    async def begin(self, generation: int) -> None:
        """Evaluate the model that a generation starts from, if it is due; start the clock.

        Its metrics are written with that generation's. After the last one they are written at once.
        """
        last, is_first = self.config.num_generations, not self._began
        self.evaluated = {}
        if self.config.evaluates(generation):
            with self.timed(generation, "evaluate"):
                self.evaluated = await self.evaluate()
            took = self._seconds[generation]["evaluate"]
            if is_first and took >= _LONG and generation < last and self.evaluated:
                # The first generation, whose line has the result too, may take long as well.
                say(f"before generation {generation + 1}: {line_of('', self.evaluated).strip()}")
        if generation == last:
            self.tracker.log(last, {**self.evaluated, **self.progress.metrics()})
            self.tracker.recorded(last)
        self._began, self._stats = time.perf_counter(), self.engine.stats()

    async def record(
        self,
        generation: int,
        groups_P: Sequence[TrajectoryGroup],
        metrics: Mapping[str, float],
        keep: Callable[[], Awaitable[None]],
    ) -> None:
        """Record a generation, and begin the next one.

        Args:
            generation: its number.
            groups_P: its rollouts.
            metrics: metrics of the method that moves the model.
            keep: writes the state to resume from.

        Raises:
            RunDirectoryError: The disk refuses; the generation does not count.
        """
        self.progress.rolled_out(groups_P)
        stats, total = self.engine.stats(), time.perf_counter() - self._began
        rose = {name: now - self._stats.get(name, 0.0) for name, now in stats.items()}
        seconds = self._seconds[generation]
        restarted = stats.get("restarted", 0.0)  # Also during the evaluation before.
        metrics = {
            **self.evaluated,
            **self.progress.metrics(),
            **self.dataset.metrics(),
            "rollouts/failed": len(lost_rollouts(groups_P)),
            "engines/restarted": restarted - self._restarted,
            "time/unix": time.time(),
            **self.tracker.metrics(),
            **metrics,
            **{f"time/{name}": seconds[name] for name in _TIMES if name in seconds},
            "time/total": total,
            "throughput/answers_per_second": count_answers(groups_P) / total,
            "throughput/tokens_per_second": count_tokens(groups_P) / total,
            **_prompts_shared(rose),
        }
        self._restarted = restarted
        with self.timed(generation, "record"):
            self.tracker.log_rollouts(
                generation, groups_P, cast(Decode, self.engine.tokenizer.decode)
            )
            self.tracker.log(generation, metrics)
            await keep()
            self.tracker.recorded(generation + 1)
        del self._seconds[generation]
        await self.begin(generation + 1)

    async def finish(self) -> None:
        """Let trackers finish after the last generation."""
        await anyio.to_thread.run_sync(self.tracker.finish, abandon_on_cancel=True)


def _prompts_shared(rose: Mapping[str, float]) -> Mapping[str, float]:
    """Return the share of prompt tokens found in the cache, if the engine counts them."""
    if "prefilled_tokens" not in rose:
        return {}
    cached, prefilled = rose["cached_tokens"], rose["prefilled_tokens"]
    return {"throughput/prompt_tokens_shared": cached / max(cached + prefilled, 1.0)}
