"""Trackers, and several of them as one.

A run calls `log` once per generation, after its last measurement and before its history line, and
`recorded` after that line. So metrics are on the disk before the generation counts, and a
generation that is shown as done cannot be lost. Both are called once more at the end, with
`num_generations`, for the last evaluation of the centre; then `finish`, and `close` however a run
ends. The metrics of generation t describe the centre that it started from (`test/...`) and its
genomes (everything else).
"""

import contextlib
import dataclasses
import itertools
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Literal, TypeAlias

import chz

from es_cookbook.common.checks import check_types
from es_cookbook.common.seeds import derive_seed
from es_cookbook.population.sampler import Underway
from es_cookbook.rl.types import Logs, LostRollout, Trajectory, TrajectoryGroup
from es_cookbook.runs.directory.directory import CHECKPOINTS, MODEL

GENERATION = "progress/generation"
Decode: TypeAlias = Callable[[Sequence[int]], str]
"""Tokens to text; a tokenizer's own `decode`."""


@dataclasses.dataclass(slots=True)
class RunInfo:
    """Facts about a run for its trackers.

    Attributes:
        path: the run directory.
        run_seed: also seeds the choice of rollouts that are kept.
        start_generation: the first of this process; above 0 for a resumed run.
        measured: rows of `metrics.jsonl` of the generations before it.
        underway: rollouts in progress.
        learns: place of the result: the history, or a model at `model_path`.
    """

    path: Path
    config_json: str
    run_seed: int
    num_generations: int
    start_generation: int = 0
    measured: Sequence[Mapping[str, float]] = ()
    underway: Underway = dataclasses.field(default_factory=Underway)
    learns: Literal["history", "model"] = "history"

    def model_path(self, generations: int) -> Path:
        """Return the path of the model after this many generations, for a run without a history.

        It exists from its checkpoint until the next one.
        """
        return self.path / CHECKPOINTS / str(generations) / MODEL


class Tracker:
    """Receives the measurements of a run; does nothing by default."""

    def log(self, generation: int, metrics: Mapping[str, float]) -> None:
        """Receive the metrics of a generation; NaN and infinities are allowed."""

    def log_rollouts(
        self, generation: int, groups_P: Sequence[TrajectoryGroup], decode: Decode
    ) -> None:
        """Receive the rollouts of a generation; a tracker may keep some of them."""

    def metrics(self) -> Mapping[str, float]:
        """Return the tracker's own metrics, which are logged with every generation."""
        return {}

    def recorded(self, generations: int) -> None:
        """Handle that this many generations are recorded: the last logs count, and may be shown."""

    def finish(self) -> None:
        """Finish all work after the last generation; called in a thread."""

    def close(self) -> None:
        """Release files and the terminal, also after a failure; twice is harmless."""


@chz.chz
class TrackerBuilder(ABC):
    """Builds a tracker for a run."""

    _types = chz.validate(check_types)

    is_of_one_run: ClassVar[bool] = False
    """Whether it writes to a place that a fork must not share with its parent."""

    def check(self) -> None:
        """Check the settings at the start of a run; does nothing by default.

        Raises:
            ESCookbookError: Something is missing, in one sentence.
        """
        return

    def summarise(
        self, log_path: Path, rows: Sequence[Mapping[str, object]], *, is_over: bool
    ) -> str:
        """Write a summary of several runs, such as a sweep's; does nothing by default.

        Args:
            log_path: directory of all these runs.
            rows: rows of their table; `run` names a directory in it, `generations` how many it has.
            is_over: whether all runs have ended.

        Returns:
            A sentence about it, or "".

        Raises:
            ESCookbookError: It cannot be written.
        """
        return ""

    @abstractmethod
    def __call__(self, run: RunInfo) -> Tracker:
        """Build the tracker and open its files.

        Raises:
            RunDirectoryError: It cannot be written.
            ConfigError: It does not support such a run.
        """


class Trackers(Tracker):
    """Several trackers as one, called in order."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self._trackers = trackers

    def log(self, generation: int, metrics: Mapping[str, float]) -> None:
        for tracker in self._trackers:
            tracker.log(generation, metrics)

    def log_rollouts(
        self, generation: int, groups_P: Sequence[TrajectoryGroup], decode: Decode
    ) -> None:
        for tracker in self._trackers:
            tracker.log_rollouts(generation, groups_P, decode)

    def metrics(self) -> Mapping[str, float]:
        return {k: value for each in self._trackers for k, value in each.metrics().items()}

    def recorded(self, generations: int) -> None:
        for tracker in self._trackers:
            tracker.recorded(generations)

    def finish(self) -> None:
        """Finish every tracker."""
        for tracker in self._trackers:
            tracker.finish()

    def close(self) -> None:
        """Close every tracker, also when one of them fails to."""
        with contextlib.ExitStack() as stack:
            for tracker in self._trackers:
                stack.callback(tracker.close)


@dataclasses.dataclass(frozen=True, slots=True)
class SampledRollout:
    """One rollout of a generation.

    Attributes:
        problem: index in the batch.
        genome: index in the population.
        attempt: index of the genome's attempt at the problem.
        tags: tags of the problem.
        reward: its reward, group reward included; NaN for a lost rollout.
        logs: logs of the group reward.
    """

    problem: int
    genome: int
    attempt: int
    tags: tuple[str, ...]
    rollout: Trajectory | LostRollout
    reward: float
    logs: Logs


def choose_rollouts(
    run_seed: int, generation: int, groups_P: Sequence[TrajectoryGroup], count: int
) -> list[SampledRollout]:
    """Choose up to `count` rollouts at random, the same ones when the generation is run again.

    Genomes 2i and 2i + 1, which are mirrored in an antithetic population, are chosen together, at
    the same problem and attempt, so that a perturbation can be compared with its opposite.
    """
    places = [
        (p, g, k)
        for p, group in enumerate(groups_P)
        for g, trajectories_K in enumerate(group.trajectories_G_K)
        for k in range(len(trajectories_K))
    ]
    chooser = random.Random(derive_seed(run_seed, "shown rollouts", generation))
    drawn = chooser.sample(places, min(count, len(places)))
    in_pairs = ((p, either, k) for p, g, k in drawn for either in (g, g ^ 1))
    known = set(places)
    wanted = dict.fromkeys(place for place in in_pairs if place in known)
    chosen = sorted(itertools.islice(wanted, count))
    rewards_P_G_K = {p: groups_P[p].rewards_G_K for p, _, _ in chosen}
    return [
        SampledRollout(
            *(p, g, k, groups_P[p].tags, groups_P[p].trajectories_G_K[g][k]),
            rewards_P_G_K[p][g][k],
            given_G_K[g][k].logs if (given_G_K := groups_P[p].group_rewards_G_K) else {},
        )
        for p, g, k in chosen
    ]
