"""Whether answers that were cut lacked room, or do not end.

A chat model ends its turn. A base model goes on behind its answer, with a question of its own or
the same line again, until `sampling.max_tokens` cuts it: then more tokens are no help, and a stop
text is. Which of the two it is shows in the answers that were cut, measured by two shares:

    ran on      text follows a first line that is an answer already: it holds the gold answer, or
                is hardly longer than that
    repeated    the answer ends in one piece of text several times over

Both are signs, not proofs: a model that thinks in lines as short as the gold answer runs on too.
"""

import math
from collections.abc import Callable, Sequence

from es_cookbook.rl.letters import folded
from es_cookbook.rl.types import EnvGroupBuilder

_LONGER = 2
"""Times as long as the gold answer a first line may be, and so many characters beside."""
_BESIDE = 12
_TIMES, _CHARACTERS = 3, 24
"""How often, and over how much text, a piece is repeated at the end."""
_LONGEST_PIECE = 100


def runs_on(text: str, gold: str | None) -> bool:
    r"""Whether an answer has more lines behind a first one that is an answer by itself.

    >>> runs_on(" 42\nQ: 3 + 4?\nA: 7", "41"), runs_on("First add the tens: 30\nthen", "41")
    (True, False)
    >>> runs_on("It is the river Nile.\nIt is long.", "Nile"), runs_on("a\nb", "a\nb")
    (True, False)
    """
    first, _, rest = text.partition("\n")
    first, gold = first.strip(), (gold or "").strip()
    if not (first and rest.strip() and gold) or "\n" in gold:
        return False
    is_short = len(first) <= _LONGER * len(gold) + _BESIDE
    return is_short or folded(gold) in folded(first)


def repeats_itself(text: str) -> bool:
    r"""Whether a text ends in one piece several times over; the last may be cut.

    >>> repeats_itself("the end of the end of the end of the en"), repeats_itself("1. a\n2. b\n")
    (True, False)
    """
    tail = text.rstrip()[-_TIMES * _LONGEST_PIECE :]
    for size in range(1, len(tail) // _TIMES + 1):
        times = max(_TIMES, math.ceil(_CHARACTERS / size))
        if tail.endswith(tail[-size:] * times):
            return True
    return False


def gold_of(problem: EnvGroupBuilder) -> str | None:
    """A problem's gold answer, if it has one of one turn."""
    gold = getattr(problem, "gold", None)
    return gold if isinstance(gold, str) else None


def endings(cut: Sequence[tuple[str, str | None]], num_answers: int) -> dict[str, float]:
    """Shares of all answers that ran on and that repeat themselves; nothing where none was cut.

    Args:
        cut: texts that were cut, each with its problem's gold answer.
        num_answers: how many answers there are.
    """
    if not cut:
        return {}

    def share(shows: Callable[[str, str | None], bool]) -> float:
        return sum(shows(text, gold) for text, gold in cut) / num_answers

    return {
        "rollouts/ran_on": share(runs_on),
        "rollouts/repeated": share(lambda text, _: repeats_itself(text)),
    }
