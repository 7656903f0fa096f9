"""What a generation leaves behind, in the order in which it is written.

Rollouts and metrics first, the history line last: a generation counts once that line is on the
disk, and only then do trackers show it, take a snapshot of it or push it. Whatever comes before
that line is written again after a crash.
"""

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import cast

import anyio
import numpy as np
from numpy.typing import NDArray

from es_cookbook.common.terminal import done_saying
from es_cookbook.engines.base import Engine
from es_cookbook.evolution.genome import Step
from es_cookbook.evolution.optimizers.base import Optimizer, tied_fraction
from es_cookbook.population.ahead import Attempted
from es_cookbook.population.sampler import Seconds
from es_cookbook.population.scoring import Scoring
from es_cookbook.rl.rollouts import count_tokens, lost_rollouts
from es_cookbook.rl.types import ProblemResult, RLDataset
from es_cookbook.runs.directory import METRICS, RunDirectory
from es_cookbook.runs.history.format import Record
from es_cookbook.runs.measures import Progress
from es_cookbook.runs.tracking.base import Decode, Tracker
from es_cookbook.train.config import Config
from es_cookbook.train.stopwatch import Stopwatch

ANSWER = "rollout_centre"
"""The method in which the centre answers, where genomes score what it said."""


class Recorder:
    """Measures and records the generations of a run, and its centre on held-out problems.

    `evaluate` measures the centre there: metrics `test/...`. `stopwatch` times `ask` and `tell` of
    the optimizer and `apply` of the engine.
    """

    def __init__(
        self,
        config: Config,
        directory: RunDirectory,
        engine: Engine,
        dataset: RLDataset,
        optimizer: Optimizer,
        scoring: Scoring,
        tracker: Tracker,
        evaluate: Callable[[], Awaitable[Mapping[str, float]]],
    ) -> None:
        self._config = config
        self._history = directory.history
        self._engine = engine
        self._dataset = dataset
        self._optimizer = optimizer
        self._scoring = scoring
        self._tracker = tracker
        self._evaluate = evaluate
        self._decode = cast(Decode, engine.tokenizer.decode)
        self._progress = Progress(directory.path / METRICS)
        for step in self._history.steps():
            self._progress.moved(step)
        self._evaluated: Mapping[str, float] = {}
        self._restarted = 0.0
        self.stopwatch = Stopwatch()

    async def begin(self, generation: int) -> None:
        """Evaluate the centre that a generation starts from, where it is due; start the clock.

        Its metrics are written with that generation's. After the last one they are written at once.
        """
        last = self._config.num_generations
        self._evaluated = {}
        if self._config.evaluates(generation):
            with self.stopwatch.lap("evaluate"):
                self._evaluated = await self._evaluate()
        if generation == last:
            self._tracker.log(last, {**self._evaluated, **self._progress.metrics()})
            self._tracker.recorded(last)
        self.stopwatch.start()

    async def record(
        self,
        attempt: Attempted,
        scores_P_G: NDArray[np.float64],
        fitness_G: NDArray[np.float64],
        results_P: Sequence[ProblemResult],
        step: Step,
        fingerprint: int,
    ) -> None:
        """Record a generation, and begin the next one.

        A score is NaN where a rollout was lost, fitness where the genome is left out; the
        fingerprint is that of the centre after the step.

        Raises:
            RunDirectoryError: The disk refuses; the generation does not count.
        """
        generation, groups_P = attempt.generation, self._scoring.groups_P
        centre = self._config.centre_of(generation)
        self._progress.rolled_out(groups_P)
        self._progress.moved(step)
        restarted = self._engine.stats().get("restarted", 0.0)
        metrics = {
            **self._evaluated,
            **self._progress.metrics(),
            **self._scoring.metrics(),
            **self._dataset.metrics(),
            **self._optimizer.metrics(),
            **self._in_force(generation),
            "genomes/tied_fraction": tied_fraction(attempt.genomes_G, fitness_G),
            "step/rms_over_sigma": step.rms / self._optimizer.sigma(generation),
            "rollouts/failed": len(lost_rollouts(groups_P)),
            "engines/restarted": restarted - self._restarted,
            "time/unix": time.time(),
            **self._seconds(attempt.seconds, count_tokens(groups_P)),
            **self._tracker.metrics(),
        }
        self._restarted = restarted
        scores = tuple(map(tuple, scores_P_G.tolist())) if self._optimizer.records_scores else None
        with self.stopwatch.lap("record"):
            self._tracker.log_rollouts(generation, groups_P, self._decode)
            self._tracker.log(generation, metrics)
            self._history.append(
                Record(
                    *(generation, step, tuple(fitness_G.tolist()), fingerprint),
                    *(scores, tuple(results_P)),
                    None if centre == generation else centre,
                )
            )
            self._tracker.recorded(generation + 1)
        done_saying()
        await self.begin(generation + 1)

    async def finish(self) -> None:
        """Wait for what trackers still have under way after the last generation."""
        await anyio.to_thread.run_sync(self._tracker.finish, abandon_on_cancel=True)

    def _in_force(self, generation: int) -> Mapping[str, float]:
        """What schedules and adaptation made of the optimizer's settings in this generation."""
        rate = self._optimizer.learning_rate(generation)
        rates = {} if rate is None else {"optimizer/learning_rate": rate}
        return {"optimizer/sigma": self._optimizer.sigma(generation), **rates}

    def _seconds(self, rollouts: Seconds, num_tokens: int) -> Mapping[str, float]:
        total, seconds = self.stopwatch.total, self.stopwatch.seconds
        answering = {"time/answer": seconds[ANSWER]} if ANSWER in seconds else {}
        return {
            **answering,
            "time/ask": seconds.get("ask", 0.0),  # the generation may have begun before the clock
            "time/tell": seconds["tell"],
            "time/load": rollouts.load,
            "time/sample": rollouts.sample,
            "time/score": rollouts.score,
            "time/apply": seconds["apply"],
            "time/total": total,
            "throughput/tokens_per_second": num_tokens / total,
        }
