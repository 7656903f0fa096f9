"""Cryptic clues as a dataset: the trial set, or rows of a local file or a Hub set.

Rows have `clue` and `answer`, and where known `enumeration`, which may also stand at the clue's
end: "Cold dessert (3,5)". Public sets of cryptic clues have these columns; others of theirs, such
as `definition`, are not shown to the model. Metrics are reported by `kind` where rows have one.

A clue is held out by its answer: no answer of a held-out clue is trained on, with any clue.
"""

import functools
from pathlib import Path
from typing import Literal, TypeAlias

import chz
from typing_extensions import override

from es_cookbook.recipes.crossword.reward import Crossword, canonical, enumeration_of
from es_cookbook.rl.data.rows import Row
from es_cookbook.rl.data.task import RowDatasetBuilder, TaskEnv, check_row
from es_cookbook.rl.problem_env import ProblemGroupBuilder
from es_cookbook.rl.prompts import PREFILL_DOC, render_observation
from es_cookbook.rl.types import SOURCE_DOC, Tokenizer

CLUES = Path(__file__).parent / "clues.jsonl"

PromptStyle: TypeAlias = Literal["compact", "words"]

_WORDS = """\
Solve this cryptic crossword clue: {clue}

A cryptic clue has a definition of the answer at its beginning or at its end; the rest is wordplay \
that gives the same letters. The numbers in brackets say how many letters each word of the answer \
has. Show your work in <think> </think> tags. And return the answer in <answer> </answer> tags, \
for example <answer> ice cream </answer>."""


def question(clue: str, enumeration: str | None, style: PromptStyle) -> str:
    r"""Return the clue and its enumeration, with an explanation ("words") or without.

    >>> question("turned romed", "(5)", "compact"), question("Cold (3,5)", "(3,5)", "compact")
    ('turned romed (5)\n', 'Cold (3,5)\n')
    """
    ends_in_it = enumeration is None or clue.rstrip().endswith(enumeration)
    whole = clue.strip() if ends_in_it else f"{clue.strip()} {enumeration}"
    if style == "compact":
        return f"{whole}\n"
    return _WORDS.format(clue=whole)


@chz.chz
class CrosswordDatasetBuilder(RowDatasetBuilder):
    """Cryptic clues for training and, disjoint from them by answer, for the held-out test."""

    source: str = chz.field(default=str(CLUES), doc=f"{SOURCE_DOC}; the trial set by default")
    prompt: PromptStyle = chz.field(
        default="compact",
        doc="compact: the clue alone; words: with what it is, as a chat if the model has one",
    )
    prefill: str = chz.field(default="", doc=PREFILL_DOC)
    reward: Crossword = chz.field(default_factory=Crossword, doc="exact or shaped reward")

    @override
    def key(self, row: Row) -> str:
        return canonical(row.text("answer"))

    @override
    def check_fields(self, row: Row) -> None:
        _ = row.text("clue"), row.text("answer"), row.optional_text("kind")
        check_row(self.reward, row)

    @override
    def problem(self, row: Row, tokenizer: Tokenizer) -> ProblemGroupBuilder:
        self.check_fields(row)
        clue, answer, kind = row.text("clue"), row.text("answer"), row.optional_text("kind")
        text = question(clue, enumeration_of(row.fields), self.prompt)
        chat = self.prompt == "words"
        observation = render_observation(tokenizer, text, chat=chat, prefill=self.prefill)
        reward = self.reward.after(observation.opened)
        return ProblemGroupBuilder(
            functools.partial(TaskEnv, observation, reward, row, 1.0),
            row.where,
            gold=f"<answer>{answer}</answer>",
            problem_tags=(kind,) if kind else (),
        )
