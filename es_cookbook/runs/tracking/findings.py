"""Problems that show in the metrics of a run: a sentence each, with what to change.

    nothing    every reward is 0, all genomes earn the same, or no genome differs from its twin, in
               this generation and in most of the last twenty
    far        genomes earn less than half of what the centre does, and the held-out reward has not
               risen: sigma is too large
    fallen     the centre earns less on held-out problems than it did: 95 % intervals are apart
    cut        many answers end at `sampling.max_tokens`

The live view, `show` and the report use these sentences. They depend on the rows of `metrics.jsonl`
alone, so a recorded run gives the same ones.
"""

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

from es_cookbook.runs.tracking.base import GENERATION
from es_cookbook.runs.tracking.jsonl import REWARD

_WINDOW = 20
"""Generations, most of which must have no signal; also those between repetitions of a finding."""
_MANY = 0.2
"""Share of cut answers that is reported."""
_BROKEN = 0.5
"""Share of the centre's reward below which perturbations are too large."""
_LOW, _HIGH = "test/low/reward/mean", "test/high/reward/mean"
"""Ends of the held-out reward's interval."""
_SEE = 'see "Finding σ and α" in docs/hyper_parameters.md'
_APART = "if answers in rollouts.jsonl differ, have the reward tell them apart"
_NEVER = (
    "see in rollouts.jsonl whether the reward takes right answers as right; if it does, take "
    "easier problems, partial credit, or a prompt that shows the form of an answer"
)

_Row: TypeAlias = Mapping[str, float]


class Findings:
    """Findings in the rows of a run, as they come.

    Attributes:
        latest: kind -> sentence, of the last row.
    """

    def __init__(self) -> None:
        self.latest: Mapping[str, str] = {}
        self._had_no_signal = deque[bool](maxlen=_WINDOW)
        self._told: dict[str, int] = {}
        self._taken = 0
        self._held_out: list[_Row] = []
        self._of_both: _Row = {}
        """The last row with a held-out reward and one of genomes."""

    def take(self, row: _Row) -> list[str]:
        """Take the next row; returns the sentences that are new in the last generations."""
        self._taken += 1
        if REWARD in row:
            self._held_out.append(row)
            self._of_both = row if "reward/mean" in row else self._of_both
        found = {
            "nothing": self._nothing(row),
            "far": self._too_far() if self._has_not_risen() else "",
            "fallen": self._fallen(),
            "cut": self._cut(row),
        }
        self.latest = {kind: sentence for kind, sentence in found.items() if sentence}
        if "nothing" in self.latest:  # Its text says what to change.
            self.latest = {k: s for k, s in self.latest.items() if k not in ("far", "fallen")}
        told = [kind for kind in self.latest if self._is_due(kind)]
        self._told |= dict.fromkeys(told, self._taken)
        return [self.latest[kind] for kind in told]

    def _is_due(self, kind: str) -> bool:
        return kind not in self._told or self._taken - self._told[kind] >= _WINDOW

    def _nothing(self, row: _Row) -> str:
        """Describe a lack of signal, if most of the last generations had none."""
        found = self._no_signal(row)
        if "reward/mean" in row:
            self._had_no_signal.append(bool(found))
        return found if 2 * sum(self._had_no_signal) > len(self._had_no_signal) else ""

    def _no_signal(self, row: _Row) -> str:
        """Return the reason why a generation has no signal; "" if it has one."""
        known = self._too_far() or self._fallen()
        now = f" (now {row['optimizer/sigma']:g})" if "optimizer/sigma" in row else ""
        more = f"raise optimizer.sigma{now}, or ask more problems per generation; {_SEE}"
        if row.get("reward/max_genome") == 0 == row.get("reward/min_genome"):
            return f"every reward is 0, so nothing is learned: {known or _NEVER}"
        if row.get("objective/std_genomes", row.get("reward/std_genomes", 1.0)) <= 1e-12:
            change = known or f"{_APART}; if not, {more}"
            if row.get("env/all/correct") == 1:
                change = "every problem is solved, so take harder ones"
            value = f" ({row['reward/mean']:.3g})" if "reward/mean" in row else ""
            return f"all genomes earn the same{value}, so nothing is learned: {change}"
        is_genetic = any(key.startswith("genetic/") for key in row)  # Its champion may stay.
        is_empty = row.get("step/rms_over_sigma") == 0 and not is_genetic
        if row.get("genomes/tied_fraction") == 1 or is_empty:
            if row.get("optimizer/learning_rate") == 0:
                return "the step is empty, since optimizer.learning_rate is 0 here"
            return f"the step is empty or luck, since no genome differs from its twin: {more}"
        return ""

    def _has_not_risen(self) -> bool:
        """Return whether two or more evaluations show the centre no better than at the start."""
        if len(self._held_out) < 2:
            return False
        first, last = self._held_out[0], self._held_out[-1]
        return last[REWARD] <= max(first[REWARD], first.get(_HIGH, -math.inf))

    def _too_far(self) -> str:
        """Return advice if perturbations broke the centre that was evaluated last."""
        both = self._of_both
        if "optimizer/sigma" not in both:
            return ""
        centre, genomes = both[REWARD], both["reward/mean"]
        if not 0 <= genomes < _BROKEN * both.get(_LOW, centre):
            return ""
        return (
            f"perturbations break the model: lower optimizer.sigma (now "
            f"{both['optimizer/sigma']:g}), since genomes earn {genomes:.3g} and the centre "
            f"{centre:.3g} on held-out problems; {_SEE}"
        )

    def _fallen(self) -> str:
        """Return advice if the interval of the last evaluation is below that of the best one."""
        if len(self._held_out) < 2:
            return ""
        best, last = max(self._held_out, key=lambda row: row[REWARD]), self._held_out[-1]
        if not last.get(_HIGH, math.inf) < best.get(_LOW, -math.inf):
            return ""
        return (
            f"the centre gets worse: lower the learning rate, since the held-out reward fell from "
            f"{best[REWARD]:.3g} to {last[REWARD]:.3g}"
        )

    def _cut(self, row: _Row) -> str:
        """Return advice about cut answers.

        It is "" if the centre's own answers are not cut, because perturbations make answers long.
        """
        of_centre = self._held_out[-1].get("test/rollouts/truncated") if self._held_out else None
        is_es = "optimizer/sigma" in row
        return "" if is_es and of_centre is not None and of_centre <= _MANY else cut_answers(row)


def cut_answers(row: _Row) -> str:
    """Return advice, by how they look, if many answers were cut; else "".

    >>> cut_answers({"rollouts/truncated": 0.9, "rollouts/ran_on": 0.1}).partition(": ")[2]
    'raise it, or ask for shorter answers'
    """
    cut = row.get("rollouts/truncated", 0.0)
    if not cut > _MANY:
        return ""
    change = "raise it, or ask for shorter answers"
    if row.get("rollouts/ran_on", 0.0) > cut / 2:
        change = (
            "most do not stop, but go on after a line that is an answer already; "
            'sampling.stop="\\n" ends an answer with its first line'
        )
    return f"{cut:.0%} of the answers were cut off at sampling.max_tokens: {change}"


def all_findings(rows: Sequence[_Row]) -> Iterator[str]:
    """Yield one sentence for each kind of finding, with the generations that have it."""
    found = Findings()
    when: dict[str, list[int]] = {}
    last: dict[str, str] = {}
    for number, row in enumerate(rows):
        found.take(row)
        for kind, sentence in found.latest.items():
            when.setdefault(kind, []).append(int(row.get(GENERATION, number)) + 1)
            last[kind] = sentence
    for kind, sentence in last.items():
        first, *more = when[kind]
        which = f"generation {first}"
        if more:
            num = 1 + len(more)
            is_whole = num == more[-1] - first + 1
            which = f"{'' if is_whole else f'{num} of '}generations {first} to {more[-1]}"
        yield f"{which}: {sentence}"
