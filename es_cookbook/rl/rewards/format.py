"""Rewards for the form of an answer: `<think>…</think><answer>…</answer>`, whatever its content.

Two of them: the share of correctly placed tags, and the form of "Evolution Strategies at Scale"
(arXiv 2509.24372), 1 for the whole form and less for parts of it. Everything is substring search,
so the cost is linear in the text, whatever it is; regular expressions for the same patterns
are quadratic on hostile text.
"""

from collections.abc import Collection, Sequence
from typing import Literal, TypeAlias, cast

import chz

from es_cookbook.common.errors import ConfigError
from es_cookbook.rl.rewards.base import Fields, Reward
from es_cookbook.rl.types import Tokenizer

Tag: TypeAlias = Literal["think_open", "think_close", "answer_open", "answer_close"]

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
ANSWER_OPEN, ANSWER_CLOSE = "<answer>", "</answer>"


def tag_format_reward(
    text: str, *, excluded: Collection[Tag] = (), prompt_ends_in_think: bool = False
) -> float:
    """Share of the expected tags that are correctly placed, in [0, 1].

    `<think>` counts if it occurs once, at the start; `</think>` if it occurs exactly once;
    `<answer>` if it occurs exactly once, after `</think>`; `</answer>` if it occurs exactly once,
    at the end. Without a correct `</think>` the answer tags, which must follow it, earn
    nothing, unless `</think>` is excluded. White space around the whole is ignored.

    Tags in `excluded` are neither expected nor checked. With `prompt_ends_in_think` the prompt
    already holds the opening `<think>`, so the text need not.

    >>> tag_format_reward("<think>1+2=3</think><answer>1+2</answer>")
    1.0
    >>> tag_format_reward("<think>1+2=3<answer>1+2</answer>")
    0.25
    """
    text = text.strip()
    think_closed = text.count(THINK_CLOSE) == 1
    body = text.partition(THINK_CLOSE)[2] if think_closed else ""
    if "think_close" in excluded:
        body = text
    placed: dict[Tag, bool] = {
        "think_open": text.startswith(THINK_OPEN) and text.count(THINK_OPEN) == 1,
        "think_close": think_closed,
        "answer_open": text.count(ANSWER_OPEN) == 1 and ANSWER_OPEN in body,
        "answer_close": text.count(ANSWER_CLOSE) == 1 and body.endswith(ANSWER_CLOSE),
    }
    expected = [
        placed[tag]
        for tag in placed
        if tag not in excluded and not (tag == "think_open" and prompt_ends_in_think)
    ]
    return sum(expected) / len(expected) if expected else 1.0


def paper_format_reward(text: str, *, prompt_ends_in_think: bool = False) -> float:
    r"""Form as in "Evolution Strategies at Scale": 1 for the whole, else for its parts.

    The whole is `<think>…</think>\n<answer>…</answer>` from the first character to the last;
    else 0.1 for a `<think>…</think>` anywhere plus 0.5 for an `<answer>…</answer>` anywhere.

    With `prompt_ends_in_think` the prompt already holds the opening `<think>`: it is prepended.

    >>> paper_format_reward("<think>1+2=3</think>\n<answer>1+2</answer>")
    1.0
    >>> paper_format_reward("<think>1+2=3</think> so <answer>1+2</answer>")
    0.6
    """
    if prompt_ends_in_think:
        text = THINK_OPEN + text
    middle = f"{THINK_CLOSE}\n{ANSWER_OPEN}"
    seam = text.find(middle, len(THINK_OPEN))
    ends = text.startswith(THINK_OPEN) and text.endswith(ANSWER_CLOSE)
    if ends and seam >= 0 and seam + len(middle) + len(ANSWER_CLOSE) <= len(text):
        return 1.0
    return 0.1 * _has_pair(text, THINK_OPEN, THINK_CLOSE) + 0.5 * _has_pair(
        text, ANSWER_OPEN, ANSWER_CLOSE
    )


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
    excluded: tuple[Tag, ...] = chz.field(
        default=(), doc="tags that are not expected; form=tags only"
    )
    prompt_ends_in_think: bool = chz.field(
        default=False, doc="the prompt already holds the opening <think>"
    )

    @chz.validate
    def _excluded(self) -> None:
        if self.excluded and self.form == "paper":
            raise ConfigError("excluded needs form=tags: form=paper always expects all of them")

    def __call__(self, text: str, row: Fields) -> float:
        del row
        in_think = self.prompt_ends_in_think
        if self.form == "paper":
            return paper_format_reward(text, prompt_ends_in_think=in_think)
        return tag_format_reward(text, excluded=self.excluded, prompt_ends_in_think=in_think)


def extract_answer(text: str) -> str | None:
    """The content of the last `<answer>`, stripped; None where it is missing or never closed.

    >>> extract_answer("<answer>1</answer> no, <answer> 2 </answer>")
    '2'
    """
    start = text.rfind(ANSWER_OPEN)
    end = text.find(ANSWER_CLOSE, start)
    if start < 0 or end < 0:
        return None
    return text[start + len(ANSWER_OPEN) : end].strip()


def _has_pair(text: str, opening: str, closing: str) -> bool:
    """Whether `opening` occurs before `closing`."""
    start = text.find(opening)
    return start >= 0 and text.find(closing, start + len(opening)) >= 0


def prompt_ends_in_think(tokenizer: Tokenizer, tokens_T: Sequence[int]) -> bool:
    """Whether a prompt already holds the opening `<think>`, as some chat templates end in it."""
    end = cast(str, tokenizer.decode(list(tokens_T[-8:])))
    return end.rstrip().endswith(THINK_OPEN)
