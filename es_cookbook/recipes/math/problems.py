r"""Problems read from rows in the formats of GSM8K, MATH and DeepScaleR.

- GSM8K: `question` and `answer`; the answer is what stands behind the last `####` of `answer`.
- DeepScaleR: `problem` and `answer`, with or without `solution`; the answer is `answer`.
- MATH: `problem` and `solution`; the answer is the last `\boxed{}` of `solution`. `level` and
  `type` become tags.

Every row says by its columns which format it has, so one file may mix them.
"""

import dataclasses
from typing import Literal, TypeAlias

from es_cookbook.common.errors import DataError
from es_cookbook.recipes.generated import fold_of_text
from es_cookbook.rl.data.rows import Row
from es_cookbook.rl.rewards.answers import boxed, texts_of

Format: TypeAlias = Literal["GSM8K", "MATH", "DeepScaleR"]

MARK = "####"
"""Stands before the answer of a GSM8K row."""


@dataclasses.dataclass(frozen=True, slots=True)
class Problem:
    """One problem.

    Attributes:
        question: in words.
        gold: its answer, LaTeX or a number.
        is_number: whether the answer is compared as a number, as GSM8K's are.
        tags: names under which metrics are reported, for example "level 5".
    """

    question: str
    gold: str
    is_number: bool
    tags: tuple[str, ...]

    @property
    def key(self) -> str:
        return self.question

    @property
    def fold(self) -> int:
        """Which fold it belongs to, by its question."""
        return fold_of_text(self.question)


def format_of(row: Row) -> Format:
    """Which format a row has, by its columns.

    Raises:
        DataError: None of them; names the columns found.
    """
    found = [name for name, value in row.fields.items() if value is not None]
    if "question" in found and "answer" in found:
        return "GSM8K"
    if "problem" in found and "answer" in found:
        return "DeepScaleR"
    if "problem" in found and "solution" in found:
        return "MATH"
    raise row.error(
        "a row has question and answer (as GSM8K), problem and solution (MATH), or problem and "
        f"answer (DeepScaleR), found: {', '.join(found) or 'nothing'}"
    )


def read_problem(row: Row) -> Problem:
    """The problem of a row.

    Raises:
        DataError: Columns of no known format, or no answer where the format has it.
    """
    form = format_of(row)
    question = row.text("question" if form == "GSM8K" else "problem").strip()
    gold = {"GSM8K": _after_mark, "MATH": _in_box, "DeepScaleR": _given}[form](row)
    if not gold:
        raise row.error("the answer is empty")
    return Problem(question, gold, form == "GSM8K", _tags(row))


def _after_mark(row: Row) -> str:
    _, mark, gold = row.text("answer").rpartition(MARK)
    if not mark:
        raise row.error(
            f"field 'answer' must end in '{MARK} ' and the answer beside a field 'question' (as "
            "GSM8K); an answer alone goes with a field 'problem' (as DeepScaleR)"
        )
    return gold.strip().replace(",", "")


def _in_box(row: Row) -> str:
    gold = boxed(row.text("solution"))
    if gold is None:
        raise row.error(r"field 'solution' must have the answer in \boxed{}, as MATH's rows do")
    return gold


def _given(row: Row) -> str:
    try:
        (gold,) = texts_of(row.fields, "answer")
    except (DataError, ValueError) as error:
        raise row.error(f"field 'answer' must be one answer ({error})") from None
    return gold.strip()


def _tags(row: Row) -> tuple[str, ...]:
    """`level` and `type`, where there are some: "Level 5" is "level 5"."""
    found: list[str] = []
    for name in ("level", "type"):
        value = row.fields.get(name)
        if isinstance(value, str | int) and value != "":
            text = " ".join(str(value).lower().split())
            found.append(f"level {text}" if name == "level" and text.isdigit() else text)
    return tuple(found)
