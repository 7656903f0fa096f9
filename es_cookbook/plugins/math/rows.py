r"""Rows of public sets of mathematical problems: the question, and the answer that is marked.

- GSM8K: `question` and `answer`; the answer is what stands behind the last `####` of `answer`.
- DeepScaleR: `problem` and `answer`, with or without `solution`; the answer is `answer`.
- MATH: `problem` and `solution`; the answer is the last `\boxed{}` of `solution`. `level` and
  `type` become tags.

Every row says by its columns which format it has, so one file may mix them.
"""

import dataclasses

from es_cookbook.common.errors import DataError
from es_cookbook.rl.data.generated import fold_of_text
from es_cookbook.rl.data.rows import Row
from es_cookbook.rl.rewards.answers import boxed, texts_of
from es_cookbook.rl.rewards.values import Scalar, printed

MARK = "####"
"""Stands before the answer of a GSM8K row."""


@dataclasses.dataclass(frozen=True, slots=True)
class Asked:
    """A problem that its question identifies.

    Attributes:
        question: the question in words; all that the answer needs.
    """

    question: str

    @property
    def key(self) -> str:
        return self.question

    @property
    def fold(self) -> int:
        """The problem's fold, a function of its question."""
        return fold_of_text(self.question)


@dataclasses.dataclass(frozen=True, slots=True)
class MathProblem(Asked):
    """One problem.

    Attributes:
        gold: its answer, LaTeX or a number.
        is_number: whether the answer is compared as a number, as GSM8K's are.
        tags: names under which metrics are reported, for example "level 5".
    """

    gold: str
    is_number: bool
    tags: tuple[str, ...]


def read_problem(row: Row) -> MathProblem:
    r"""Read the problem of a row, whose columns say which format it has.

    Raises:
        DataError: Columns of no known format, or no answer where the format has it.
    """
    found = [name for name, value in row.fields.items() if value is not None]
    is_gsm8k = {"question", "answer"} <= {*found}
    if is_gsm8k:
        _, mark, gold = row.text("answer").rpartition(MARK)
        if not mark:
            raise row.error(
                f"field 'answer' must end in '{MARK} ' and the answer beside a field 'question' "
                "(as GSM8K); an answer alone goes with a field 'problem' (as DeepScaleR)"
            )
        gold = gold.strip().replace(",", "")
    elif {"problem", "answer"} <= {*found}:
        gold = one_answer(row, "answer")
    elif {"problem", "solution"} <= {*found}:
        gold = boxed(row.text("solution"))
        if gold is None:
            raise row.error(r"field 'solution' must have the answer in \boxed{}, as MATH's rows do")
    else:
        raise row.error(
            "a row has question and answer (as GSM8K), problem and solution (MATH), or problem and "
            f"answer (DeepScaleR), found: {', '.join(found) or 'nothing'}"
        )
    question = row.text("question" if is_gsm8k else "problem").strip()
    if not gold:
        raise row.error("the answer is empty")
    return MathProblem(question, gold, is_gsm8k, _tags(row))


def one_answer(row: Row, name: str) -> str:
    """Return the only answer under `name`."""
    try:
        (answer,) = texts_of(row.fields, name)
    except (DataError, ValueError) as error:
        raise row.error(f"field {name!r} must be one answer ({error})") from None
    return answer.strip()


def _tags(row: Row) -> tuple[str, ...]:
    """Return `level` and `type`, where there are some: "Level 5" is "level 5"."""
    found: list[str] = []
    for name in ("level", "type"):
        value = row.fields.get(name)
        if isinstance(value, Scalar) and value != "":
            text = " ".join(printed(value).lower().split())
            found.append(f"level {text}" if name == "level" and text.isdigit() else text)
    return tuple(found)
