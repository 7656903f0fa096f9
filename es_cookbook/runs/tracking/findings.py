"""What the metrics of a run say that its user should know: a sentence, with what to change.

    nothing learned    every reward is 0, all genomes earn the same, or all mirrored pairs are tied,
                       in this generation and in most of the last twenty
    broken             genomes earn less than half of what the centre does, and nothing rose; or the
                       centre earns less on held-out problems than it did
    luck               the genomes' differences were luck in most generations, and nothing rose
    cut                many answers end at `sampling.max_tokens`: too little room, or no end
    few                some answers lack a metric that others to the same problem report
    unchanged          a held-out result is the first in every digit, or the third of one value

The live view, `show` and the report all have their sentences from here. They follow from rows of
`metrics.jsonl` alone, so a recorded run says what it said while it went on.

Most state what was counted. Two are estimates, made so that less than one false alarm is to be
expected in the runs of all recipes together:

- Luck needs two signs. `genomes/reliability` is below 0.05 in 14 of the last 20 generations: it is
  in 52 to 79 % of the generations without any signal (16 to 512 genomes), and in up to half of
  those of runs that learn. And no reward rose since the run began: neither its mean over
  generations, by one standard error (Welch, one-sided 16 %), nor a held-out one beyond the interval
  of the first. Simulated for 50 generations of which half look like luck, without held-out
  problems, it is said of 5 % of the runs that rise by 1.7 standard deviations of a batch (0.8 of 17
  runs), and of none in 600 that rise by 3.3, as recipes do; of 60 and 90 % of the runs of 30 and 60
  generations that learn nothing (65 % look like luck).
- The centre is worse where the 95 % intervals of two evaluations are apart. Those of one centre are
  in 0.3 % of the pairs if problems are drawn anew, and they are the same problems.
"""

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean, variance
from typing import TypeAlias

from es_cookbook.rl.rollouts import PARTLY
from es_cookbook.runs.tracking.base import GENERATION
from es_cookbook.runs.tracking.jsonl import CORRECT, REWARD

_LUCK = 0.05
"""Reliability below which the differences of a generation look like luck."""
_WINDOW, _MOST_OF_THEM = 20, 14
"""It is measured on few genomes, and that of a run that learns is often 0."""
_FIRST = 10
"""Generations with which later ones are compared."""
_RISEN = 1.0
"""Standard errors by which a mean must have risen to be no luck."""
_SURE = 3
"""Standard deviations of genomes below their mean: what almost all of them earned."""
_MANY = 0.2
"""Of answers that are cut."""
_AGAIN = 20
"""Generations after which what still holds is told again."""
_ZERO, _EQUAL, _TIED, _LUCKY, _FALLEN, _FAR = "zero", "equal", "tied", "luck", "fallen", "far"
_OF_STEPS = (_ZERO, _EQUAL, _TIED, _LUCKY, _FALLEN, _FAR)
"""Kinds that say that nothing is learned."""
_EVALUATIONS = 3
"""After so many with one result, nothing moves."""
_BROKEN = 0.5
"""Of the centre's reward: where genomes earn less, they are too far from it."""
_LOW, _HIGH = "test/low/reward/mean", "test/high/reward/mean"
"""Ends of the held-out reward's interval."""
_SEE = 'see "Finding σ and α" in docs/hyper_parameters.md'
_PARTIAL = "ask more problems per generation, or take easier ones or partial credit"
_APART = "if answers in rollouts.jsonl differ, have the reward tell them apart"
_NEVER = (
    "see in rollouts.jsonl whether the reward takes right answers as right; if it does, take "
    "easier problems, partial credit, or a prompt that shows the form of an answer"
)

_Row: TypeAlias = Mapping[str, float]
_Finding: TypeAlias = tuple[str, str]
"""A kind, and a sentence; findings of one kind say the same of several generations."""


class Means:
    """The means of the first generations and of the last.

    >>> means = Means()
    >>> for mean in (0.2, 0.3, 0.2, 0.3, 0.4, 0.5, 0.4, 0.5):
    ...     means.add(mean)
    >>> means.have_risen
    True
    """

    def __init__(self) -> None:
        self._first: list[float] = []
        self._last = deque[float](maxlen=_WINDOW)
        self._count = 0

    def add(self, mean: float) -> None:
        """Of the next generation."""
        if not math.isfinite(mean):
            return
        self._count += 1
        self._last.append(float(mean))
        if len(self._first) < _FIRST:
            self._first.append(float(mean))

    @property
    def have_risen(self) -> bool:
        """Whether the last are above the first, by the test of Welch 1947."""
        num_first = min(_FIRST, self._count // 2)
        if num_first < 2:
            return False
        first, last = self._first[:num_first], list(self._last)[num_first - self._count :]
        error = math.sqrt(variance(first) / len(first) + variance(last) / len(last))
        return fmean(last) - fmean(first) > _RISEN * error


class Findings:
    """What is found in the rows of a run, as they come.

    Attributes:
        latest: what was found in the last row.
    """

    def __init__(self) -> None:
        self.latest: Sequence[_Finding] = ()
        self._held_out: list[_Row] = []
        self._best: _Row = {}
        """Of the held-out rows, by the reward."""
        self._of_both: _Row = {}
        """The last one in which genomes have a reward as well."""
        self._reliabilities = deque[float](maxlen=_WINDOW)
        self._had_no_signal = deque[bool](maxlen=_WINDOW)
        self._means = {"reward/mean": Means(), "objective/mean": Means()}
        self._most, self._sure = 0.0, 0.0
        """What the best genome earned so far, and what almost all earned in one generation."""
        self._is_es = False
        self._told: dict[str, int] = {}
        self._taken = 0

    def take(self, row: _Row) -> list[_Finding]:
        """Take the next row; returns what in it was not told lately."""
        self._taken += 1
        self._is_es |= "optimizer/sigma" in row
        if REWARD in row:
            self._held_out.append(row)
            self._best = max(self._best, row, key=lambda each: each.get(REWARD, -math.inf))
            if "reward/mean" in row:
                self._of_both = row
        if "genomes/reliability" in row:
            self._reliabilities.append(row["genomes/reliability"])
        for key, means in self._means.items():
            means.add(row.get(key, math.nan))
        of_steps = self._no_signal(row) or self._broken() or self._luck(row)
        found = (of_steps, self._cut(row), _few(row), self._unchanged(of_steps))
        spread = row.get("reward/std_genomes", math.inf)
        self._most = max(self._most, row.get("reward/max_genome", 0.0))
        self._sure = max(self._sure, row.get("reward/mean", 0.0) - _SURE * spread)
        self.latest = [each for each in found if each is not None]
        told = [each for each in self.latest if self._is_due(each[0])]
        self._told |= {kind: self._taken for kind, _ in told}
        return told

    def _is_due(self, kind: str) -> bool:
        return kind not in self._told or self._taken - self._told[kind] >= _AGAIN

    def _no_signal(self, row: _Row) -> _Finding | None:
        """One generation in many without a signal is no loss, so most must have none."""
        found = self._nothing(row)
        if "reward/mean" in row:
            self._had_no_signal.append(found is not None)
        return found if 2 * sum(self._had_no_signal) > len(self._had_no_signal) else None

    def _nothing(self, row: _Row) -> _Finding | None:
        """Why nothing can be learned from this generation, by itself."""
        known = self._too_far() or self._fallen() or self._fallen_now(row)
        change = known or _more(row)
        if row.get("reward/max_genome") == 0 == row.get("reward/min_genome"):
            change = known or (_PARTIAL if self._most > 0 else _NEVER)
            return _ZERO, f"every reward is 0, so nothing is learned: {change}"
        spread = row.get("objective/std_genomes", row.get("reward/std_genomes", 1.0))
        if spread <= 1e-12:
            value = f" ({row['reward/mean']:.3g})" if "reward/mean" in row else ""
            if row.get("env/all/correct") == 1:
                change = "every problem is solved, so take harder ones"
            elif not known:
                change = f"{_APART}; if not, {change}"
            return _EQUAL, f"all genomes earn the same{value}, so nothing is learned: {change}"
        if row.get("genomes/tied_fraction") == 1 or _is_empty(row):
            if row.get("optimizer/learning_rate") == 0:
                return _TIED, "the step is empty, since optimizer.learning_rate is 0 here"
            return (
                _TIED,
                f"the step is empty or luck, since no genome differs from its twin: {change}",
            )
        return None

    def _broken(self) -> _Finding | None:
        """Until the next evaluation."""
        if fallen := self._fallen():
            return _FALLEN, f"the centre gets worse: {fallen}"
        is_new = len(self._held_out) < 2 or self._held_out_has_risen
        if is_new or not (too_far := self._too_far()):
            return None
        return _FAR, f"perturbations break the model: {too_far}"

    def _luck(self, row: _Row) -> _Finding | None:
        count = sum(each < _LUCK for each in self._reliabilities)
        if "genomes/reliability" not in row or count < _MOST_OF_THEM:
            return None
        if self._held_out_has_risen or any(each.have_risen for each in self._means.values()):
            return None
        return (
            _LUCKY,
            f"the genomes' differences look like luck in {count} of the last "
            f"{len(self._reliabilities)} generations (genomes/reliability below {_LUCK}), and so "
            f"do the steps, since no reward rose: {self._too_far() or _more(row)}",
        )

    def _cut(self, row: _Row) -> _Finding | None:
        """Where the centre's answers are not cut, perturbations make them long."""
        of_centre = self._held_out[-1].get("test/rollouts/truncated") if self._held_out else None
        if self._is_es and of_centre is not None and not of_centre > _MANY:
            return None
        return ("cut", said) if (said := cut_answers(row)) else None

    @property
    def _held_out_has_risen(self) -> bool:
        """Whether the last held-out reward is above the first, and its interval if it has one."""
        if not self._held_out:
            return False
        first, last = self._held_out[0], self._held_out[-1]
        return last[REWARD] > max(first[REWARD], first.get(_HIGH, -math.inf))

    def _too_far(self) -> str | None:
        """What to change where perturbations broke the centre that was measured last."""
        both = self._of_both
        if not self._is_es or not both:
            return None
        centre, genomes = both[REWARD], both["reward/mean"]
        if not 0 <= genomes < _BROKEN * both.get(_LOW, centre):
            return None
        return (
            f"lower optimizer.sigma{_now(both)}, since genomes earn {genomes:.3g} and the centre "
            f"{centre:.3g} on held-out problems; {_SEE}"
        )

    def _fallen(self) -> str | None:
        """What to change where the centre's interval is below that of its best."""
        last = self._held_out[-1] if self._held_out else {}
        if not last.get(_HIGH, math.inf) < self._best.get(_LOW, -math.inf):
            return None
        return self._smaller_steps("the held-out reward", self._best[REWARD], last[REWARD])

    def _fallen_now(self, row: _Row) -> str | None:
        """The same between two evaluations, by what almost all genomes earned once."""
        mean = row.get("reward/mean", self._sure)
        if not 0 <= mean < _BROKEN * self._sure:
            return None
        return self._smaller_steps("the genomes' reward", self._sure, mean)

    def _smaller_steps(self, what: str, before: float, now: float) -> str:
        option = "optimizer.learning_rate" if self._is_es else "learning_rate"
        return f"lower {option}, since {what} fell from {before:.3g} to {now:.3g}"

    def _unchanged(self, of_steps: _Finding | None) -> _Finding | None:
        """Until the next evaluation, or a view would show it for one generation."""
        if len(self._held_out) < 2:
            return None
        first, *later = self._held_out
        row = later[-1]
        same = "is the same as before the first generation in every digit"
        if any(key.startswith("test/") and row.get(key) != first[key] for key in first):
            key = CORRECT if CORRECT in row else REWARD
            if len(later) < _EVALUATIONS - 1 or row[REWARD] > first[REWARD]:
                return None
            if any(each.get(key) != row[key] for each in self._held_out):
                return None
            same = f"({key} {row[key]:.3g}) is the same in all {len(self._held_out)} evaluations"
        if row.get(CORRECT) == 1:
            change = "every held-out problem is solved, so take harder ones"
        elif of_steps or any(kind in _OF_STEPS for kind, _ in self.latest):
            change = f"nothing was learned; {_SEE}"
        elif self._is_es:
            change = f"raise optimizer.learning_rate or optimizer.sigma; {_SEE}"
        else:
            change = "raise learning_rate"
        return "unchanged", f"the held-out result {same}: {change}"


def _more(row: _Row) -> str:
    return f"raise optimizer.sigma{_now(row)}, or ask more problems per generation; {_SEE}"


def _now(row: _Row) -> str:
    return f" (now {row['optimizer/sigma']:g})" if "optimizer/sigma" in row else ""


def _is_empty(row: _Row) -> bool:
    """Whether the centre stayed; where a champion stays it is no bad sign."""
    is_genetic = any(key.startswith("genetic/") for key in row)
    return row.get("step/rms_over_sigma") == 0 and not is_genetic


def _few(row: _Row) -> _Finding | None:
    counts = {key.removeprefix(PARTLY): row[key] for key in row if key.startswith(PARTLY)}
    if not counts:
        return None
    told = ", ".join(f"{metric} is over {count:.0f}" for metric, count in counts.items())
    return (
        "few",
        f"some answers report metrics that others to the same problem do not ({told} answers), so "
        "their means do not compare with those of other generations or runs: have the reward "
        "return the same metrics for every answer, 0 where there is nothing to measure",
    )


def cut_answers(row: _Row, prefix: str = "rollouts/") -> str:
    """What to change where many answers were cut, by what they look like; else nothing.

    >>> cut_answers({"rollouts/truncated": 0.9, "rollouts/ran_on": 0.1}).partition(": ")[2]
    'raise it, or ask for shorter answers'
    """
    cut = row.get(f"{prefix}truncated", 0.0)
    if not cut > _MANY:
        return ""
    of_cut = f"{cut:.0%} of the answers were cut off at sampling.max_tokens"
    if row.get(f"{prefix}ran_on", 0.0) > cut / 2:
        return (
            f"{of_cut}: most do not stop, but go on after a line that is an answer already; "
            'sampling.stop="\\n" ends an answer with its first line'
        )
    if row.get(f"{prefix}repeated", 0.0) > cut / 2:
        return (
            f"{of_cut}: most do not stop, but repeat themselves, so a higher limit is no help; "
            'name the text that should end an answer (sampling.stop="..."), or show in the prompt '
            "how one ends"
        )
    return f"{of_cut}: raise it, or ask for shorter answers"


def all_findings(rows: Sequence[_Row]) -> Iterator[str]:
    """One sentence for each kind of finding, with the generations in which it was found."""
    found = Findings()
    when: dict[str, list[int]] = {}
    last: dict[str, str] = {}
    for number, row in enumerate(rows):
        found.take(row)
        for kind, sentence in found.latest:
            when.setdefault(kind, []).append(int(row.get(GENERATION, number)) + 1)
            last[kind] = sentence
    for kind, sentence in last.items():
        yield f"{_which(when[kind], len(rows))}: {sentence}"


def _which(generations: Sequence[int], of: int) -> str:
    first, last, count = generations[0], generations[-1], len(generations)
    if count == 1:
        return "at the end" if first >= of else f"generation {first}"
    if count == last - first + 1:
        return f"generations {first} to {last}"
    return f"{count} generations of {first} to {last}"
