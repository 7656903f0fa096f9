"""What the metrics of a run say that its user should know: a sentence, with what to change.

    nothing learned    every reward is 0, all genomes earn the same, or all mirrored pairs are tied
    luck               the genomes' differences were luck for some generations
    cut                many answers end at `sampling.max_tokens`: too little room, or no end
    unchanged          a held-out result is the first in every digit, or the third of one value

The live view, `show` and the report all have their sentences from here. They follow from rows of
`metrics.jsonl` alone, so a recorded run says what it said while it went on.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

from es_cookbook.runs.tracking.base import GENERATION
from es_cookbook.runs.tracking.jsonl import CORRECT, REWARD

_LUCK = 0.05
"""Reliability below which differences are taken for luck, if it stays there."""
_GENERATIONS_OF_LUCK = 3
_MANY = 0.2
"""Of answers that are cut."""
_AGAIN = 20
"""Generations after which what still holds is told again."""
_ZERO, _EQUAL, _TIED, _CHANCE = "zero", "equal", "tied", "luck"
_NO_SIGNAL = (_ZERO, _EQUAL, _TIED, _CHANCE)
"""Kinds of generations of which nothing can be learned."""
_EVALUATIONS = 3
"""After so many with one result, nothing moves."""
_BROKEN = 0.5
"""Of the centre's reward: where genomes earn less, they are too far from it."""
_SEE = 'see "Finding σ and α" in docs/hyper_parameters.md'

_Row: TypeAlias = Mapping[str, float]
_Finding: TypeAlias = tuple[str, str]
"""A kind, and a sentence; findings of one kind say the same of several generations."""


class Findings:
    """What is found in the rows of a run, as they come.

    Attributes:
        latest: what was found in the last row.
    """

    def __init__(self) -> None:
        self.latest: Sequence[_Finding] = ()
        self._held_out: list[_Row] = []
        self._reliabilities = deque[float](maxlen=_GENERATIONS_OF_LUCK)
        self._is_es = False
        self._told: dict[str, int] = {}
        self._taken = 0

    def take(self, row: _Row) -> list[_Finding]:
        """Take the next row; returns what in it was not told lately."""
        self._taken += 1
        if "genomes/reliability" in row:
            self._reliabilities.append(row["genomes/reliability"])
        self._is_es |= "optimizer/sigma" in row
        if held_out := {key: value for key, value in row.items() if key.startswith("test/")}:
            self._held_out.append(held_out)
        found = (self._no_signal(row), _cut(row), self._unchanged())
        self.latest = [each for each in found if each is not None]
        told = [each for each in self.latest if self._is_due(each[0])]
        self._told |= {kind: self._taken for kind, _ in told}
        return told

    def _is_due(self, kind: str) -> bool:
        return kind not in self._told or self._taken - self._told[kind] >= _AGAIN

    def _no_signal(self, row: _Row) -> _Finding | None:
        now = f" (now {row['optimizer/sigma']:g})" if "optimizer/sigma" in row else ""
        too_far = self._too_far(row, now)
        change = too_far or (
            f"raise optimizer.sigma{now}, or ask more problems per generation; {_SEE}"
        )
        if row.get("reward/max_genome") == 0 == row.get("reward/min_genome"):
            change = too_far or (
                "see in rollouts.jsonl whether the reward takes right answers as right; if it "
                "does, take easier problems, partial credit, or a prompt that shows the form "
                "of an answer"
            )
            return _ZERO, f"every reward is 0, so nothing is learned: {change}"
        spread = row.get("objective/std_genomes", row.get("reward/std_genomes", 1.0))
        if spread <= 1e-12:
            value = f" ({row['reward/mean']:.3g})" if "reward/mean" in row else ""
            return _EQUAL, f"all genomes earn the same{value}, so nothing is learned: {change}"
        if row.get("genomes/tied_fraction") == 1 or _is_empty(row):
            if row.get("optimizer/learning_rate") == 0:
                return _TIED, "the step is empty, since optimizer.learning_rate is 0 here"
            return (
                _TIED,
                f"the step is empty or luck, since no genome differs from its twin: {change}",
            )
        last = self._reliabilities
        is_luck = len(last) == _GENERATIONS_OF_LUCK and max(last) < _LUCK
        if "genomes/reliability" in row and is_luck:
            return (
                _CHANCE,
                f"the genomes' differences were luck in the last {_GENERATIONS_OF_LUCK} "
                f"generations (genomes/reliability below {_LUCK}), and so are the steps: {change}",
            )
        return None

    def _too_far(self, row: _Row, now: str) -> str | None:
        """What to change where perturbations break the model; `now` is what sigma is."""
        held_out = self._held_out[-1] if self._held_out else {}
        centre = held_out.get(REWARD, 0.0)
        at_least = held_out.get("test/low/reward/mean", centre)
        genomes = row.get("reward/mean", centre)
        if not 0 <= genomes < _BROKEN * at_least:
            return None
        return (
            f"lower optimizer.sigma{now}, since genomes earn {genomes:.3g} and the centre "
            f"{centre:.3g} on held-out problems; {_SEE}"
        )

    def _unchanged(self) -> _Finding | None:
        """Until the next evaluation, or a view would show it for one generation."""
        if len(self._held_out) < 2 or REWARD not in self._held_out[-1]:
            return None
        first, *later = self._held_out
        row = later[-1]
        same = "is the same as before the first generation in every digit"
        if first.items() - row.items():
            key = CORRECT if CORRECT in row else REWARD
            is_moving = row[REWARD] > first.get(REWARD, row[REWARD])
            if len(later) < _EVALUATIONS - 1 or is_moving:
                return None
            if any(each.get(key) != row[key] for each in self._held_out):
                return None
            same = f"({key} {row[key]:.3g}) is the same in all {len(self._held_out)} evaluations"
        if row.get(CORRECT) == 1:
            change = "every held-out problem is solved, so take harder ones"
        elif any(kind in _NO_SIGNAL for kind, _ in self.latest):  # Of the last generation.
            change = f"nothing was learned; {_SEE}"
        elif self._is_es:
            change = f"raise optimizer.learning_rate or optimizer.sigma; {_SEE}"
        else:
            change = "raise learning_rate"
        return "unchanged", f"the held-out result {same}: {change}"


def _is_empty(row: _Row) -> bool:
    """Whether the centre stayed; where a champion stays it is no bad sign."""
    is_genetic = any(key.startswith("genetic/") for key in row)
    return row.get("step/rms_over_sigma") == 0 and not is_genetic


def _cut(row: _Row) -> _Finding | None:
    return ("cut", said) if (said := cut_answers(row)) else None


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
