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
from typing import cast

import anyio
import chz
import numpy as np

from es_cookbook.common.spans import NO_SPANS, Spans
from es_cookbook.common.terminal import done_saying, say
from es_cookbook.engines.base import Engine
from es_cookbook.evolution.genome import Genome, Step
from es_cookbook.evolution.optimizers.base import Optimizer, tied_fraction
from es_cookbook.population.sampler import Seconds
from es_cookbook.population.scoring import Scored
from es_cookbook.rl.rollouts import count_tokens, lost_rollouts
from es_cookbook.rl.types import ProblemResult, RLDataset
from es_cookbook.runs.config import Config
from es_cookbook.runs.directory.directory import METRICS, RunDirectory, keep_options
from es_cookbook.runs.directory.opening import with_length
from es_cookbook.runs.history.format import Record
from es_cookbook.runs.sizes import length_for
from es_cookbook.runs.tracking.base import Decode, RunInfo, Tracker
from es_cookbook.runs.tracking.findings import cut_answers
from es_cookbook.runs.tracking.live import line_of
from es_cookbook.runs.tracking.measures import Progress

ANSWER = "rollout_centre"
"""The centre answers, where genomes score what it said."""
LOOP = "loop"
"""The track of what is timed, in a profile."""
_RECENT = 3
"""Generations from which it is told how many more fit."""
_LONG = 3.0
"""Seconds of an evaluation whose result is told before the generation that it is recorded with."""


@dataclasses.dataclass(eq=False)
class Recorder:
    """Measures and records the generations of a run, and its centre on held-out problems.

    `evaluate` measures the centre there: metrics `test/...`. A run that is to be over at `until`
    (of `time.perf_counter`) has as many generations as fit; `config` and `info` say how many by
    now. `spans` is told of what is timed; who profiles a run sets another.
    """

    config: Config
    directory: RunDirectory
    engine: Engine
    dataset: RLDataset
    optimizer: Optimizer
    tracker: Tracker
    info: RunInfo
    evaluate: Callable[[], Awaitable[Mapping[str, float]]]
    until: float | None = None
    spans: Spans = dataclasses.field(default=NO_SPANS, init=False)

    def __post_init__(self) -> None:
        self._decode = cast(Decode, self.engine.tokenizer.decode)
        self._progress = Progress(self.directory.path / METRICS)
        for step in self.directory.history.steps():
            self._progress.moved(step)
        self._evaluated: Mapping[str, float] = {}
        self._restarted = 0.0
        self._stats: Mapping[str, float] = {}
        self._began = self._looked = 0.0
        self._seconds = defaultdict[int, dict[str, float]](dict)
        self._planned, self._evaluation = self.config.num_generations, 0.0
        self._generations = deque[float](maxlen=_RECENT)
        """Seconds of the last generations; `_evaluation` of the last evaluation."""

    @contextmanager
    def timed(self, generation: int, name: str) -> Generator[None]:
        """Inside, a generation's time counts as that of `name`."""
        began = time.perf_counter()
        yield
        ended = time.perf_counter()
        self._seconds[generation][name] = ended - began
        self.spans.add(LOOP, name, began, ended)

    def rolled_out(self, generation: int, seconds: Seconds) -> None:
        """Where the time of a generation's rollouts went."""
        self._seconds[generation] |= {
            "load": seconds.load,
            "sample": seconds.sample,
            "grade": seconds.score,
        }

    async def begin(self, generation: int, looked: float = 0.0) -> None:
        """Evaluate the centre that a generation starts from, where it is due; start the clock.

        Its metrics are written with that generation's. After the last one they are written at once.
        `looked` seconds, spent to find what the optimizer needs, count as the generation's.
        """
        last = self.config.num_generations
        self._evaluated = {}
        if self.config.evaluates(generation):
            with self.timed(generation, "evaluate"):
                self._evaluated = await self.evaluate()
            self._evaluation = self._seconds[generation]["evaluate"]
            if not self._began and generation < last:
                self._tell_evaluated(generation)
        if generation == last:
            self.tracker.log(last, {**self._evaluated, **self._progress.metrics()})
            self.tracker.recorded(last)
        self._looked = looked
        self._began, self._stats = time.perf_counter(), self.engine.stats()

    def _tell_evaluated(self, generation: int) -> None:
        """Say what the centre earns, where the generation that follows may take long as well."""
        found = self._evaluated
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
        self._progress.rolled_out(groups_P)
        self._progress.moved(step)
        stats = self.engine.stats()
        restarted = stats.get("restarted", 0.0)
        metrics = {
            **self._evaluated,
            **self._progress.metrics(),
            **scored.metrics,
            **self.dataset.metrics(),
            **optimizer.metrics(),
            **self._in_force(generation),
            "genomes/tied_fraction": tied_fraction(genomes_G, scored.fitness_G),
            "step/rms_over_sigma": step.rms / optimizer.sigma(generation),
            "rollouts/failed": len(lost_rollouts(groups_P)),
            "engines/restarted": restarted - self._restarted,
            "time/unix": time.time(),
            **self._times(generation),
            **self._throughput(stats, count_tokens(groups_P)),
            **self.tracker.metrics(),
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
            self.tracker.log_rollouts(generation, groups_P, self._decode)
            self.tracker.log(generation, metrics)
            self.directory.history.append(record)
            self.tracker.recorded(generation + 1)
        del self._seconds[generation]
        done_saying()
        self._generations.append(time.perf_counter() - self._began)
        self._end_in_time(generation + 1)
        await self.begin(generation + 1)

    def _end_in_time(self, done: int) -> None:
        """Make the run longer or shorter, where its time is given and it is evaluated."""
        config = self.config
        if self.until is None or not config.evaluates(done):
            return
        left, generation = self.until - time.perf_counter(), float(np.mean(self._generations))
        length = length_for(config, self._planned, done, left, generation, self._evaluation)
        if length != config.num_generations:
            self.config = chz.replace(config, num_generations=length)
            self.directory.keep(with_length(self.directory.config_json, length))
            keep_options(self.directory.path, self.config)
            self.info.num_generations = length

    async def finish(self) -> None:
        """Wait for what trackers still have under way after the last generation."""
        await anyio.to_thread.run_sync(self.tracker.finish, abandon_on_cancel=True)

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
            "time/total": time.perf_counter() - self._began + self._looked,
        }

    def _throughput(self, stats: Mapping[str, float], num_tokens: int) -> Mapping[str, float]:
        """What the engine did a second since the generation began, as far as it counts that."""
        total = time.perf_counter() - self._began
        rose = {name: now - self._stats.get(name, 0.0) for name, now in stats.items()}
        counted = {"throughput/tokens_per_second": num_tokens / total}
        if "requests" in rose:
            counted["throughput/answers_per_second"] = rose["requests"] / total
        if "prefilled_tokens" in rose:
            known, of = rose["cached_tokens"], rose["cached_tokens"] + rose["prefilled_tokens"]
            counted["throughput/prompt_tokens_per_second"] = of / total
            counted["throughput/prompt_tokens_shared"] = known / max(of, 1.0)
        return counted
