"""Crossword answers: compared letter by letter, ignoring accents, case and spaces.

The exact reward looks at the first `<answer>` alone, outside of thoughts. The shaped one gives
a little to an answer that is nearly right, and nothing for mentioning many words:

    min(1, exact + 0.02 · share of correct tags · stands + 0.25 · contains)

`stands` is whether the solution stands as a word somewhere in the text. `contains` is 1 where it
does so in the answer, or in the whole text, if what is searched has at most 25 words; it falls
linearly to 0 at 80 words.

Of a text the last `LONGEST_TEXT` characters are searched, and an answer of more than
`LONGEST_ANSWER` is wrong, so hostile texts cost little.

Left out: letters that no decomposition brings to A-Z, such as Æ or Ø, which are dropped.
"""

import re
import unicodedata
from itertools import accumulate
from typing import Literal, Self

import chz
from typing_extensions import override

from es_cookbook.common.errors import DataError
from es_cookbook.common.terminal import plural
from es_cookbook.rl.messages.thoughts import spoken
from es_cookbook.rl.rewards.answers import field_of
from es_cookbook.rl.rewards.base import Fields, Reward
from es_cookbook.rl.rewards.format import ANSWER_CLOSE, ANSWER_OPEN, THINK_OPEN, tag_format_reward
from es_cookbook.rl.types import Metrics

RAMP = (25, 80)
"""Words of a searched text from which containing the solution loses worth, and has none."""
LONGEST_TEXT = 4000
"""Characters at a text's end that are searched."""
LONGEST_ANSWER = 1000
"""Characters of the longest answer that is read."""

_INSIDE_WORDS = re.compile(
    "[\u0300-\u036f\u1ab0-\u1aff\u1dc0-\u1dff\u20d0-\u20ff\ufe20-\ufe2f'’‘`]+"
)
"""Apostrophes, and the blocks of marks that decomposition takes off Latin letters."""


def canonical(text: str) -> str:
    """Return the letters of an answer in upper case, without accents; `&` is AND.

    >>> canonical("Crème brûlée"), canonical("R & B")
    ('CREMEBRULEE', 'RANDB')
    """
    return "".join(_words(text))


def letters(enumeration: str) -> int:
    """Return the number of letters in an enumeration.

    >>> letters("(3,2-4)")
    9
    """
    return sum(int(digits) for digits in re.findall("[0-9]{1,3}", enumeration))


def first_answer(text: str) -> str | None:
    """Return the content of the first `<answer>` outside of thoughts, if any."""
    _, opened, rest = spoken(text).partition(ANSWER_OPEN)
    answer, closed, _ = rest.partition(ANSWER_CLOSE)
    return answer if opened and closed else None


def enumeration_of(row: Fields) -> str | None:
    """Return a row's `enumeration`, or the one at the end of its clue, if any.

    >>> enumeration_of({"clue": "Cold dessert (3,5)"})
    '(3,5)'
    """
    given = row.get("enumeration")
    if given is None or given == "":
        ending = re.search(r"\(\d[^()]{0,40}\)\s{0,9}$", str(row.get("clue", ""))[-60:])
        return ending[0].strip() if ending else None
    if isinstance(given, bool) or not isinstance(given, str | int) or not letters(str(given)):
        raise DataError(f"field 'enumeration' must be such as '(3,4)', found {given!r:.60}")
    return str(given)


@chz.chz
class Crossword(Reward):
    """The exact or the shaped reward of a clue's answer; at most 1.

    The row has `answer`, and where known `enumeration`, or a `clue` that ends in it. Metrics:
    `correct`, the exact reward; `fits`, whether the first `<answer>` has as many letters as the
    solution; `format`, the share of the four tags that are correctly placed.

    >>> Crossword()("<answer>ice cream</answer>", {"answer": "Ice-cream", "clue": "Cold (3,5)"})[0]
    1.0
    """

    form: Literal["shaped", "exact"] = chz.field(
        default="shaped", doc="exact: 1 or 0; shaped: a little for a solution that is there"
    )
    prompt_ends_in_think: bool | None = chz.field(
        default=None, doc="the prompt already holds the opening <think>; None: a task sees whether"
    )

    @override
    def __call__(self, text: str, row: Fields) -> tuple[float, Metrics]:
        gold, enumeration = canonical(self._solution(row)), enumeration_of(row)
        read = first_answer(text) or ""
        answer = _words(read) if len(read) <= LONGEST_ANSWER else []
        given = "".join(answer)
        fits = enumeration is None or len(given) == letters(enumeration)
        exact = float(fits and given == gold)
        # Names of tags are not words of the answer.
        everywhere = _words(re.sub("</?(?:think|answer)>", " ", text[-LONGEST_TEXT:]))
        stands = _contains(everywhere, gold)
        contains = _worth(answer if _contains(answer, gold) else everywhere) if stands else 0.0
        tags = tag_format_reward(text, prompt_ends_in_think=bool(self.prompt_ends_in_think))
        shaped = min(1.0, exact + 0.02 * tags * stands + 0.25 * contains)
        return exact if self.form == "exact" else shaped, {
            "correct": exact,
            "fits": float(len(given) == len(gold)),
            "format": tags,
        }

    @override
    def read(self, text: str, row: Fields) -> str | None:
        answer = first_answer(text)
        return None if answer is None else canonical(answer[:LONGEST_ANSWER])

    @override
    def after(self, prompt: str) -> Self:
        if self.prompt_ends_in_think is None and prompt.rstrip().endswith(THINK_OPEN):
            return chz.replace(self, prompt_ends_in_think=True)
        return self

    @override
    def check_row(self, row: Fields) -> None:
        count, enumeration = len(canonical(self._solution(row))), enumeration_of(row)
        if enumeration is not None and letters(enumeration) != count:
            raise DataError(
                f"its answer has {plural(count, 'letter')}, its enumeration {enumeration} asks for "
                f"{letters(enumeration)}"
            )

    def _solution(self, row: Fields) -> str:
        solution = field_of(row, "answer")
        if not isinstance(solution, str) or not canonical(solution):
            raise DataError(f"field 'answer' must have letters, found {solution!r:.60}")
        return solution


def _words(text: str) -> list[str]:
    """Return words in capitals A to Z; an apostrophe does not end one, `&` is a word."""
    plain = _INSIDE_WORDS.sub("", unicodedata.normalize("NFKD", text))
    return re.findall("[A-Z]+", plain.replace("&", " AND ").upper())


def _contains(words: list[str], gold: str) -> bool:
    """Return whether consecutive whole words spell the solution: SLICE has no ICE."""
    ends = {0, *accumulate(map(len, words))}
    joined = "".join(words)
    start = joined.find(gold) if gold else -1
    while start >= 0 and not (start in ends and start + len(gold) in ends):
        start = joined.find(gold, start + 1)
    return start >= 0


def _worth(words: list[str]) -> float:
    """Return the value of containing the solution, which is less in a long text."""
    full, none = RAMP
    return min(1.0, max(0.0, (none - len(words)) / (none - full)))
