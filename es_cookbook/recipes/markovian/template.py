"""What the writer of a chain of thought is asked, and what its reader sees in its place.

Both prompts are one template. The writer has the question in it and goes on with a thought. The
reader has a redaction mark where the question was, the thought, and a mark behind which it answers.
The template is filled twice: nothing is searched for and replaced, so a question that holds the
redaction mark, or a brace, is a question like any other.
"""

import dataclasses
import functools

import chz

from es_cookbook.common.errors import ConfigError
from es_cookbook.common.fields.parts import parts
from es_cookbook.rl.problem_env import render_prompt
from es_cookbook.rl.types import Tokenizer

QUESTION = "{question}"


@chz.chz
class Template:
    """For models that read words."""

    text: str = chz.field(
        default="You will be shown a question. First write, briefly, all that is needed to answer "
        "it: the answer will be read from what you write, and the question may not be there any "
        "more.\n\nQuestion: {question}\n\nReasoning:",
        doc="what stands before the thought; {question} is the question, or the redaction mark",
    )
    redaction: str = chz.field(
        default="[redacted]", doc="stands in place of the question where the thought is read"
    )
    answer_mark: str = chz.field(default="\nAnswer: ", doc="stands between thought and answer")
    chat: bool = chz.field(
        default=True, doc="put the text into the tokenizer's chat template, if it has one"
    )

    @chz.validate
    def _marks(self) -> None:
        if self.text.count(QUESTION) != 1:
            raise ConfigError(
                f"template.text must have {QUESTION} once, found {self.text.count(QUESTION)} times"
            )
        for name in ("redaction", "answer_mark"):
            if not getattr(self, name):
                raise ConfigError(f"template.{name} must be some text, found none")

    def prompt(self, question: str, tokenizer: Tokenizer) -> tuple[int, ...]:
        """The tokens before a thought."""
        before, _, after = self.text.partition(QUESTION)
        return render_prompt(tokenizer, f"{before}{question}{after}", chat=self.chat)

    def reader(self, question: str, tokenizer: Tokenizer, markovian: bool) -> "Reader":
        """How thoughts about a question are read; Markovian: without it."""
        shown = self.redaction if markovian else question
        return Reader(tokenizer, self.prompt(shown, tokenizer), self._mark)

    def answer(self, answer: str, tokenizer: Tokenizer) -> tuple[int, ...]:
        """The tokens of an answer; spaces at the end of the mark are its own, as in any text."""
        return tokens_of(tokenizer, self.answer_mark[len(self._mark) :] + answer)

    @property
    def _mark(self) -> str:
        return self.answer_mark.rstrip(" ")


parts(Template, f"{__name__}:Compact")


@chz.chz
class Compact(Template):
    """For the bundled model of single characters: `3+5+9+2:=8,17,19>19`."""

    text: str = chz.field(default="{question}:", doc="what stands before the thought")
    redaction: str = chz.field(default="?", doc="stands in place of the question")
    answer_mark: str = chz.field(default=">", doc="stands between thought and answer")
    chat: bool = chz.field(default=False, doc="put the text into the tokenizer's chat template")


TEMPLATE_NAMES = {
    name: f"{__name__}:{of}" for name, of in (("words", "Template"), ("compact", "Compact"))
}
"""What a user types on the command line."""


@dataclasses.dataclass(frozen=True)
class Reader:
    """How the thoughts about one question are read.

    A thought is read as the text that people see in logs, not as the tokens that were sampled: how
    a text is cut into tokens could tell the reader what no one can read. Texts of special tokens in
    it are text.

    Attributes:
        tokenizer: the model's own.
        prompt_T: the tokens before the thought.
        answer_mark: stands between thought and answer.
    """

    tokenizer: Tokenizer
    prompt_T: tuple[int, ...]
    answer_mark: str

    def __call__(self, thought: str, most_tokens: int) -> tuple[int, ...]:
        """What stands before the answer; of the thought, so much from its start as fits."""
        room = max(most_tokens - len(self.prompt_T) - len(self.mark_T), 0)
        return self.prompt_T + tokens_of(self.tokenizer, thought)[:room] + self.mark_T

    @functools.cached_property
    def mark_T(self) -> tuple[int, ...]:
        """The tokens of the answer mark."""
        return tokens_of(self.tokenizer, self.answer_mark)


def tokens_of(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    """A text inside of another, in which names of special tokens are text like any other."""
    return tuple(tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True))
