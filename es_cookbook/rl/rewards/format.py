"""Rewards for the form of an answer: `<think>…</think><answer>…</answer>`, with any content.

Two of them: the share of correctly placed tags, and the form of "Evolution Strategies at Scale"
(arXiv 2509.24372), 1 for the whole form and less for parts of it. Everything is substring search,
so the cost is linear in any text; regular expressions for the same patterns are quadratic on
hostile text.
"""

import functools
from collections.abc import Collection
from typing import Literal, Self, TypeAlias

import chz
from typing_extensions import override

from es_cookbook.common.errors import ConfigError
from es_cookbook.rl.messages.thoughts import spoken
from es_cookbook.rl.rewards.base import Fields, Reward

Tag: TypeAlias = Literal["think_open", "think_close", "answer_open", "answer_close"]

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
ANSWER_OPEN, ANSWER_CLOSE = "<answer>", "</answer>"


@chz.chz
class Tags:
    """The two tags around a part of an answer."""

    start: str = chz.field(doc="before it, any text")
    end: str = chz.field(doc="behind it, any text")

    @chz.validate
    def _some(self) -> None:
        for name in ("start", "end"):
            if not getattr(self, name).strip():
                raise ConfigError(f"{name} must be some text, found {getattr(self, name)!r}")

    def is_in(self, text: str) -> bool:
        """Return whether the first tag occurs before the second."""
        start = text.find(self.start)
        return start >= 0 and text.find(self.end, start + len(self.start)) >= 0


THINK = Tags(start=THINK_OPEN, end=THINK_CLOSE)
ANSWER = Tags(start=ANSWER_OPEN, end=ANSWER_CLOSE)


def tag_format_reward(
    text: str,
    *,
    think: Tags = THINK,
    answer: Tags = ANSWER,
    excluded: Collection[Tag] = (),
    prompt_ends_in_think: bool = False,
) -> float:
    """Return the share of the expected tags that are correctly placed, in [0, 1].

    `<think>` counts if it occurs once, at the start; `</think>` if it occurs exactly once;
    `<answer>` if it occurs exactly once, after `</think>`; `</answer>` if it occurs exactly once,
    at the end. Without a correct `</think>` the answer tags, which must follow it, earn
    nothing, unless `</think>` is excluded. White space around the whole is ignored.

    `think` and `answer` are other tags in place of these. Tags in `excluded` are neither expected
    nor checked. With `prompt_ends_in_think` the prompt already holds the opening `<think>`, so the
    text need not.

    >>> tag_format_reward("<think>1+2=3</think><answer>1+2</answer>")
    1.0
    >>> tag_format_reward("<think>1+2=3<answer>1+2</answer>")
    0.25
    """
    text = text.strip()
    think_closed = text.count(think.end) == 1
    body = text.partition(think.end)[2] if think_closed else ""
    if "think_close" in excluded:
        body = text
    placed: dict[Tag, bool] = {
        "think_open": text.startswith(think.start) and text.count(think.start) == 1,
        "think_close": think_closed,
        "answer_open": text.count(answer.start) == 1 and answer.start in body,
        "answer_close": text.count(answer.end) == 1 and body.endswith(answer.end),
    }
    expected = [
        placed[tag]
        for tag in placed
        if tag not in excluded and not (tag == "think_open" and prompt_ends_in_think)
    ]
    return sum(expected) / len(expected) if expected else 1.0


def paper_format_reward(
    text: str, *, think: Tags = THINK, answer: Tags = ANSWER, prompt_ends_in_think: bool = False
) -> float:
    r"""Score the form as in "Evolution Strategies at Scale": 1 for the whole, less for parts.

    The whole is `<think>…</think>\n<answer>…</answer>` from the first character to the last;
    else 0.1 for a `<think>…</think>` anywhere plus 0.5 for an `<answer>…</answer>` anywhere.
    `think` and `answer` are other tags in place of these.

    With `prompt_ends_in_think` the prompt already holds the opening `<think>`: it is prepended.

    >>> paper_format_reward("<think>1+2=3</think>\n<answer>1+2</answer>")
    1.0
    >>> paper_format_reward("<think>1+2=3</think> so <answer>1+2</answer>")
    0.6
    """
    if prompt_ends_in_think:
        text = think.start + text
    middle = f"{think.end}\n{answer.start}"
    seam = text.find(middle, len(think.start))
    ends = text.startswith(think.start) and text.endswith(answer.end)
    if ends and seam >= 0 and seam + len(middle) + len(answer.end) <= len(text):
        return 1.0
    return 0.1 * think.is_in(text) + 0.5 * answer.is_in(text)


@chz.chz
class Format(Reward):
    """The form of an answer as a reward function; the row does not matter.

    >>> Format()("<think>1+2=3</think><answer>1+2", {})
    0.75
    """

    form: Literal["tags", "paper"] = chz.field(
        default="tags",
        doc="tags: share of correct tags; paper: 1 if whole, or 0.1 thought + 0.5 answer",
    )
    think: Tags = chz.field(
        default=THINK,
        blueprint_unspecified=functools.partial(Tags, start=THINK_OPEN, end=THINK_CLOSE),
        doc="the tags around the thought",
    )
    answer: Tags = chz.field(
        default=ANSWER,
        blueprint_unspecified=functools.partial(Tags, start=ANSWER_OPEN, end=ANSWER_CLOSE),
        doc="the tags around the answer",
    )
    excluded: tuple[Tag, ...] = chz.field(default=(), doc="tags not expected; form=tags only")
    prompt_ends_in_think: bool | None = chz.field(
        default=None,
        doc="the prompt already holds the tag before the thought; None: a task sees whether",
    )

    @chz.validate
    def _excluded(self) -> None:
        if self.excluded and self.form == "paper":
            raise ConfigError("excluded needs form=tags: form=paper always expects all of them")

    def __call__(self, text: str, row: Fields) -> float:
        tags = {"think": self.think, "answer": self.answer}
        in_think = bool(self.prompt_ends_in_think)
        if self.form == "paper":
            return paper_format_reward(text, **tags, prompt_ends_in_think=in_think)
        return tag_format_reward(
            text, **tags, excluded=self.excluded, prompt_ends_in_think=in_think
        )

    @override
    def after(self, prompt: str) -> Self:
        if self.prompt_ends_in_think is None and prompt.rstrip().endswith(self.think.start):
            return chz.replace(self, prompt_ends_in_think=True)
        return self


def extract_answer(text: str) -> str | None:
    """Return the content of the last `<answer>` in a text, stripped; None without one.

    >>> extract_answer("<answer>1</answer> no, <answer> 2 </answer>")
    '2'
    """
    return last_answer(spoken(text))


def last_answer(text: str) -> str | None:
    """Return the last answer of a text without thoughts; None if its tag is not closed."""
    start = text.rfind(ANSWER_OPEN)
    end = text.find(ANSWER_CLOSE, start)
    if start < 0 or end < 0:
        return None
    return text[start + len(ANSWER_OPEN) : end].strip()
