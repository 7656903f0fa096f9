"""What a generation leaves behind, in the order in which it is written.

Rollouts and metrics first, the history line last: a generation counts once that line is on the
disk, and only then do trackers show it, take a snapshot of it or push it. Whatever comes before
that line is written again after a crash.
"""

import dataclasses
import time
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Generic, TypeVar, cast

import anyio
import chz
import numpy as np
from typing_extensions import override

from es_cookbook.common.spans import NO_SPANS, Spans
from es_cookbook.common.terminal import done_saying, say
from es_cookbook.engines.base import Engine
from es_cookbook.evolution.genome import Genome, Step
from es_cookbook.evolution.optimizers.base import Optimizer, tied_fraction
from es_cookbook.population.sampler import Seconds
from es_cookbook.population.scoring import Scored
from es_cookbook.rl.rollouts import count_tokens, lost_rollouts
from es_cookbook.rl.types import ProblemResult, RLDataset, TrajectoryGroup
from es_cookbook.runs.config import Config
from es_cookbook.runs.directory.directory import METRICS, RunDirectory
from es_cookbook.runs.directory.opening import with_length
from es_cookbook.runs.history.format import Record
from es_cookbook.runs.run_config import RunConfig
from es_cookbook.runs.tracking.base import Decode, RunInfo, Tracker
from es_cookbook.runs.tracking.findings import cut_answers
from es_cookbook.runs.tracking.live import line_of
from es_cookbook.runs.tracking.measures import Progress

_Config = TypeVar("_Config", bound=RunConfig)
ANSWER = "rollout_centre"
"""The centre answers, where genomes score what it said."""
LOOP = "loop"
"""The track of what is timed, in a profile."""
_RECENT = 3
"""Generations from which it is told how many more fit."""
_LONG = 3.0
"""Seconds of an evaluation whose result is told before the generation that it is recorded with."""


@dataclasses.dataclass(eq=False, kw_only=True)
class BaseRecorder(Generic[_Config]):
    """What every run records of its generations, whatever moves its model.

    `evaluate` measures the model on held-out problems: metrics `test/...`. `spans` is told of what
    is timed; who profiles a run sets another.

    Attributes:
        progress: how far the run has come.
        evaluated: what was measured of the model that the present generation starts from.
        began: when that generation did, by `time.perf_counter`.
    """

    config: _Config
    engine: Engine
    dataset: RLDataset
    tracker: Tracker
    evaluate: Callable[[], Awaitable[Mapping[str, float]]]
    spans: Spans = dataclasses.field(default=NO_SPANS, init=False)

    def __post_init__(self) -> None:
        self.progress = Progress(Path(self.config.log_path) / METRICS)
        self.evaluated: Mapping[str, float] = {}
        self.began = 0.0
        self._seconds = defaultdict[int, dict[str, float]](dict)

    @contextmanager
    def timed(self, generation: int, name: str) -> Generator[None]:
        """Inside, a generation's time counts as that of `name`."""
        began = time.perf_counter()
        yield
        ended = time.perf_counter()
        self._seconds[generation][name] = ended - began
        self.spans.add(LOOP, name, began, ended)

    async def begin(self, generation: int) -> None:
        """Evaluate the model that a generation starts from, where it is due; start the clock.

        Its metrics are written with that generation's. After the last one they are written at once.
        """
        last = self.config.num_generations
        self.evaluated = {}
        if self.config.evaluates(generation):
            with self.timed(generation, "evaluate"):
                self.evaluated = await self.evaluate()
        if generation == last:
            self.tracker.log(last, {**self.evaluated, **self.counted()})
            self.tracker.recorded(last)
        self.began = time.perf_counter()

    def counted(self) -> Mapping[str, float]:
        """How far the run has come, in metrics."""
        return self.progress.metrics()

    def usual_metrics(self, groups_P: Sequence[TrajectoryGroup]) -> Mapping[str, float]:
        """The metrics of a generation that do not depend on what moves the model."""
        return {
            **self.evaluated,
            **self.counted(),
            **self.dataset.metrics(),
            "rollouts/failed": len(lost_rollouts(groups_P)),
            "time/unix": time.time(),
            **self.tracker.metrics(),
        }

    def log(
        self, generation: int, groups_P: Sequence[TrajectoryGroup], metrics: Mapping[str, float]
    ) -> None:
        """Give the trackers what a generation did and measured."""
        decode = cast(Decode, self.engine.tokenizer.decode)
        self.tracker.log_rollouts(generation, groups_P, decode)
        self.tracker.log(generation, metrics)

    async def finish(self) -> None:
        """Wait for what trackers still have under way after the last generation."""
        await anyio.to_thread.run_sync(self.tracker.finish, abandon_on_cancel=True)


@dataclasses.dataclass(eq=False, kw_only=True)
class Recorder(BaseRecorder[Config]):
    """Measures and records the generations of a population.

    A run that is to be over at `until` (of `time.perf_counter`) has as many generations as fit;
    `config` and `info` say how many by now.
    """

    directory: RunDirectory
    optimizer: Optimizer
    info: RunInfo
    until: float | None = None

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        for step in self.directory.history.steps():
            self.progress.moved(step)
        self._restarted = 0.0
        self._stats: Mapping[str, float] = {}
        self._looked = 0.0
        self._planned, self._evaluation = self.config.num_generations, 0.0
        self._generations = deque[float](maxlen=_RECENT)
        """Seconds of the last generations; `_evaluation` of the last evaluation."""

    def rolled_out(self, generation: int, seconds: Seconds) -> None:
        """Where the time of a generation's rollouts went."""
        self._seconds[generation] |= {
            "load": seconds.load,
            "sample": seconds.sample,
            "grade": seconds.score,
        }

    @override
    async def begin(self, generation: int, looked: float = 0.0) -> None:
        """The same; `looked` seconds, spent to find what the optimizer needs, count as well."""
        is_first = not self.began
        await super().begin(generation)
        if self.config.evaluates(generation):
            self._evaluation = self._seconds[generation]["evaluate"]
            if is_first and generation < self.config.num_generations:
                self._tell_evaluated(generation)
        self._looked, self._stats = looked, self.engine.stats()

    def _tell_evaluated(self, generation: int) -> None:
        """Say what the centre earns, where the generation that follows may take long as well."""
        found = self.evaluated
        if found and self._seconds[generation]["evaluate"] >= _LONG:
            say(f"before generation {generation + 1}: {line_of('', found)}")
            if cut := cut_answers(found, "test/rollouts/"):
                say(f"before generation {generation + 1}: {cut}")
        done_saying()

    async def record(
        self,
        generation: int,
        genomes_G: Sequence[Genome],
        scored: Scored,
        results_P: Sequence[ProblemResult],
        step: Step,
        fingerprint: int,
    ) -> None:
        """Record a generation, and begin the next one.

        The fingerprint is that of the centre after the step.

        Raises:
            RunDirectoryError: The disk refuses; the generation does not count.
        """
        optimizer, groups_P = self.optimizer, scored.groups_P
        centre = self.config.centre_of(generation)
        self.progress.rolled_out(groups_P)
        self.progress.moved(step)
        stats = self.engine.stats()
        restarted = stats.get("restarted", 0.0)
        metrics = {
            **self.usual_metrics(groups_P),
            **scored.metrics,
            **optimizer.metrics(),
            **self._in_force(generation),
            "genomes/tied_fraction": tied_fraction(genomes_G, scored.fitness_G),
            "step/rms_over_sigma": step.rms / optimizer.sigma(generation),
            "engines/restarted": restarted - self._restarted,
            **self._times(generation),
            **self._throughput(stats, count_tokens(groups_P)),
        }
        self._restarted = restarted
        scores_P_G = map(tuple, scored.scores_P_G.tolist()) if optimizer.records_scores else None
        record = Record(
            generation=generation,
            step=step,
            fitness_G=tuple(scored.fitness_G.tolist()),
            fingerprint=fingerprint,
            scores_P_G=None if scores_P_G is None else tuple(scores_P_G),
            results_P=tuple(results_P),
            centre=None if centre == generation else centre,
        )
        with self.timed(generation, "record"):
            self.log(generation, groups_P, metrics)
            self.directory.history.append(record)
            self.tracker.recorded(generation + 1)
        del self._seconds[generation]
        done_saying()
        self._generations.append(time.perf_counter() - self.began)
        self._end_in_time(generation + 1)
        await self.begin(generation + 1)

    def _end_in_time(self, done: int) -> None:
        """Make the run longer or shorter, where its time is given and it is evaluated."""
        config = self.config
        if self.until is None or not config.evaluates(done):
            return
        from es_cookbook.runs.choosing.sizes import (
            length_for,  # Only where the run's time was chosen.
        )

        left, generation = self.until - time.perf_counter(), float(np.mean(self._generations))
        length = length_for(config, self._planned, done, left, generation, self._evaluation)
        if length != config.num_generations:
            self.config = chz.replace(config, num_generations=length)
            self.directory.keep(with_length(self.directory.config_json, length))
            self.info.num_generations = length

    def _in_force(self, generation: int) -> Mapping[str, float]:
        """What schedules and adaptation made of the optimizer's settings in this generation."""
        rate = self.optimizer.learning_rate(generation)
        rates = {} if rate is None else {"optimizer/learning_rate": rate}
        return {"optimizer/sigma": self.optimizer.sigma(generation), **rates}

    def _times(self, generation: int) -> Mapping[str, float]:
        seconds = self._seconds[generation]
        of_some = {"time/answer": seconds.get(ANSWER, 0.0), "time/find_sigma": self._looked}
        return {
            **{name: spent for name, spent in of_some.items() if spent},
            "time/ask": seconds["ask"],
            "time/tell": seconds["tell"],
            "time/load": seconds["load"],
            "time/sample": seconds["sample"],
            "time/score": seconds["grade"],
            "time/apply": seconds["apply"],
            "time/total": time.perf_counter() - self.began + self._looked,
        }

    def _throughput(self, stats: Mapping[str, float], num_tokens: int) -> Mapping[str, float]:
        """What the engine did a second since the generation began, as far as it counts that."""
        total = time.perf_counter() - self.began
        rose = {name: now - self._stats.get(name, 0.0) for name, now in stats.items()}
        counted = {"throughput/tokens_per_second": num_tokens / total}
        if "requests" in rose:
            counted["throughput/answers_per_second"] = rose["requests"] / total
        if "prefilled_tokens" in rose:
            known, of = rose["cached_tokens"], rose["cached_tokens"] + rose["prefilled_tokens"]
            counted["throughput/prompt_tokens_per_second"] = of / total
            counted["throughput/prompt_tokens_shared"] = known / max(of, 1.0)
        return counted
