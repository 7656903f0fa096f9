"""Conciseness: a reward of length alone, as of "Evolution Strategies at Scale" (arXiv:2509.24372).

With y the answer, s the row's shortest good answer, and lengths in characters, it is

    -| |y| - |s| |

Pitfall: any text of the right length earns all of it. `wrong` takes something from answers in which
no good answer stands; the metric `correct` says how many do not.
"""

import re

import chz

from es_cookbook.common.checks import in_range
from es_cookbook.common.errors import DataError
from es_cookbook.rl.messages.thoughts import spoken
from es_cookbook.rl.rewards.answers import texts_of
from es_cookbook.rl.rewards.base import Fields, Reward
from es_cookbook.rl.rewards.values import composed, folded
from es_cookbook.rl.types import Metrics

LONGEST_SEARCHED = 10_000
"""Characters at the start of an answer that are searched for a good answer."""


@chz.chz
class Conciseness(Reward):
    """Minus the characters by which an answer is longer, or shorter, than the shortest good one.

    Thoughts and white space around the answer do not count. Metrics: `length` in characters;
    `excess`, of which so many are above the shortest good answer, negative if it is shorter;
    `correct`, whether a good answer stands in it as separate words, in any case; `concise`,
    whether it is nothing but such an answer.

    >>> Conciseness()("It is Paris.", {"answer": "Paris"})[0]
    -7.0
    """

    field: str = chz.field(
        default="answer", doc="row field with the good answer, or a list of good answers"
    )
    wrong: float = chz.field(
        default=0.0, doc="characters that an answer costs besides if no good answer stands in it"
    )

    _wrong = in_range("wrong", at_least=0)

    def __call__(self, text: str, row: Fields) -> tuple[float, Metrics]:
        """Return the reward, at most 0, and the metrics."""
        golds = [gold.strip() for gold in texts_of(row, self.field)]
        if not all(golds):
            raise DataError(f"field {self.field!r} must be text, and some, found only white space")
        answer = composed(spoken(text).strip())
        excess = len(answer) - min(map(len, golds))
        searched, good = folded(answer[:LONGEST_SEARCHED]), [folded(gold) for gold in golds]
        is_correct = any(stands_in(gold, searched) for gold in good)
        reward = -abs(excess) - (0.0 if is_correct else self.wrong)
        return reward, {
            "correct": float(is_correct),
            "concise": float(searched in good),
            "length": float(len(answer)),
            "excess": float(excess),
        }


def stands_in(words: str, text: str) -> bool:
    """Return whether a text contains words as wholes: 42 is not in 142 or -42.5."""
    return re.search(rf"(?<!\w)(?<![-.,](?=\d)){re.escape(words)}(?!\w|[.,]\d)", text) is not None
