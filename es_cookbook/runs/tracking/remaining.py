"""How long a run still takes.

    left  =  generations left x seconds of one  +  evaluations left x seconds of one

A generation takes as long as the mean of the last ones, without the evaluation before it; before
the first has ended, as long as its rollouts will take if all take as long as those that have ended.
"""

import math
from collections import deque
from collections.abc import Callable

from es_cookbook.runs.tracking.base import RunInfo
from es_cookbook.runs.tracking.result import duration_in_words

_RECENT = 20
_WORTH_TELLING = 60.0
"""Seconds: who has started a run that takes less need not be told."""


class Remaining:
    """Estimates the time left, from when generations end.

    Attributes:
        done: generations that are recorded.
    """

    def __init__(self, run: RunInfo, clock: Callable[[], float]) -> None:
        self._run, self._clock = run, clock
        self._began = self._ended = clock()
        self._evaluations = 0.0
        self._seconds = deque[float](maxlen=_RECENT)
        """Of the last generations, evaluations left out."""
        self.done = run.start_generation

    def finished(self, generation: int) -> None:
        """A generation is recorded."""
        now, evaluations = self._clock(), self._run.underway.evaluations
        self._seconds.append(max(0.0, now - self._ended - (evaluations - self._evaluations)))
        self._ended, self._evaluations, self.done = now, evaluations, generation + 1

    @property
    def elapsed(self) -> float:
        """Seconds since this process's part of the run began."""
        return self._clock() - self._began

    @property
    def generation(self) -> float:
        """Seconds of a generation; NaN before the first has ended."""
        return sum(self._seconds) / len(self._seconds) if self._seconds else math.nan

    @property
    def seconds(self) -> float:
        """Until the last generation is recorded and evaluated; NaN while nobody can tell."""
        left = self._run.num_generations - self.done
        evaluations = self._evaluations_left * self._run.underway.evaluation
        now = self._run.underway.rollouts
        if self._seconds:
            so_far = self._clock() - self._ended
            return max(0.0, left * self.generation + evaluations - so_far)
        if not left:
            return evaluations
        if now is None or now.generation is None:
            return math.nan
        return now.seconds_left + (left - 1) * (now.seconds + now.seconds_left) + evaluations

    @property
    def _evaluations_left(self) -> int:
        """That come after the generation that comes next has begun, the last one included."""
        of = self._run.num_generations
        every = self._run.eval_every or of
        return 1 + len(range(-(-max(self.done, 1) // every) * every, of, every))

    @property
    def whole(self) -> str:
        """How long it all takes, this process's part so far included; empty while unknown."""
        takes = self.elapsed + self.seconds
        return "" if math.isnan(takes) else duration_in_words(takes)

    @property
    def told(self) -> str:
        """A sentence after the first generation of this process, if it is worth telling."""
        if len(self._seconds) != 1 or not self.seconds >= _WORTH_TELLING:
            return ""
        begins = self._run.start_generation == 0
        what = f"the run takes about {self.whole}"
        if not begins:
            what = f"the rest takes about {duration_in_words(self.seconds)}"
        took = duration_in_words(self.generation)
        return f"generation {self.done} of {self._run.num_generations} took {took}: {what}"
