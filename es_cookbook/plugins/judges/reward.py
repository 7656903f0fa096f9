"""A language model behind an OpenAI-compatible HTTP server as a judge; its mark as a reward.

The server gets one chat message, made of a template, the answer without thoughts and the row. It
replies with one mark, which `mark_in` reads; a reply with two different marks has none.
`es_cookbook.plugins.judges.chat` says when it is asked again.

    reward=judge reward.url=http://127.0.0.1:8000/v1 reward.model=my-judge

Without a mark in the end, the rollout is lost and its reward is NaN, not 0: a judge's failure is no
evidence about a genome.

Pitfalls: the judge's time counts as the Env's, so `rollout_timeout` must allow for it. A policy
learns to please its judge, not to be right: look at samples.

Left out: streaming, and keys in configs, which are recorded and shared. The key is taken from the
environment variable `ES_COOKBOOK_JUDGE_KEY`.
"""

import functools
import re
from collections.abc import Callable, Mapping
from typing import TypeVar

import anyio
import chz
from typing_extensions import override

from es_cookbook.common.checks import check_range, check_types
from es_cookbook.common.errors import ConfigError, EnvError
from es_cookbook.common.trust import needs_trust
from es_cookbook.plugins.judges.chat import AskAgainError, ChatServer, RefusedError
from es_cookbook.rl.messages.thoughts import spoken
from es_cookbook.rl.rewards.answers import text_of
from es_cookbook.rl.rewards.base import Fields, Reward
from es_cookbook.rl.timeouts import in_turn

KEY = "ES_COOKBOOK_JUDGE_KEY"
"""Environment variable with the server's key, if it needs one."""

TEXT = "text"
"""Name of the answer in a template; other names are fields of the row."""
TEMPLATE = """\
Question:
{question}

Answer of a student:
{text}

How good is the answer? Reply with a number from 0 (worthless) to 10 (perfect), and nothing else."""
_LONGEST_REPLY = 2000
"""Characters at the end of a reply that may contain the mark."""
_ADDRESS = re.compile(r"(https?://(?:[\w.-]+|\[[0-9a-fA-F:.]+\])(?::\d+)?)(?:[/?#]\S*)?", re.ASCII)
"""Addresses that every library reads alike, without a user name before the host."""
_T = TypeVar("_T")


def address_of(url: str) -> str:
    """Return the scheme, host and port of a URL; the whole URL if it can be read in several ways.

    >>> address_of("https://judge.example:8000/v1"), address_of("http://a.example@b.example/v1")
    ('https://judge.example:8000', 'http://a.example@b.example/v1')
    """
    matched = _ADDRESS.fullmatch(url)
    return matched[1] if matched else url


def _address(judge: "JudgeServer") -> str | None:
    """Return the server's address; None without a model, as in a sum without a judge."""
    return address_of(judge.url) if judge.model else None


@chz.chz
class JudgeServer:
    """A server and model that judge, and how to ask them."""

    url: str = chz.field(
        default="http://127.0.0.1:8000/v1",
        doc="URL of an OpenAI-compatible server, up to /v1",
        metadata=needs_trust(
            _address, f"is where questions go, with the key in {KEY} if there is one"
        ),
    )
    model: str = chz.field(default="", doc="the server's name for the judge; required")
    temperature: float = chz.field(default=0.0, doc="sampling temperature of the judge")
    max_tokens: int = chz.field(default=256, doc="maximum tokens of the judge's reply")
    timeout: float = chz.field(default=15.0, doc="seconds per attempt")
    attempts: int = chz.field(default=3, doc="maximum attempts per question")
    backoff: float = chz.field(
        default=0.5, doc="seconds before the second attempt, doubled each further time"
    )
    max_concurrent: int = chz.field(default=32, doc="maximum number of concurrent questions")

    _types = chz.validate(check_types)

    @chz.validate
    def _server(self) -> None:
        if not re.match(r"https?://[^/\s]", self.url):
            raise ConfigError(f"url must begin with http:// or https://, found {self.url!r}")
        check_range(self, "timeout", above=0)
        check_range(self, "temperature", "backoff", at_least=0)
        check_range(self, "max_tokens", "attempts", "max_concurrent", at_least=1)

    def check(self) -> None:
        """Refuse, before a run, to be asked without a model.

        Raises:
            ConfigError: There is none.
        """
        if not self.model:
            raise ConfigError(
                f"the judge at {self.url} needs model=..., the name of one that the server has"
            )

    async def reply(self, message: str, read: Callable[[str], _T], what: str) -> _T:
        """Ask the judge; returns `read(reply)`.

        Args:
            message: the question.
            read: raises AskAgainError for an unusable reply.
            what: the expected content of the reply, for the error.

        Raises:
            EnvError: All attempts failed, or the server refused.
        """
        if not self.model:
            raise EnvError(f"the judge at {self.url} needs a model, and is not asked without one")
        question = {
            "model": self.model,
            "messages": [{"role": "user", "content": message}],
            "temperature": self.temperature,
            "max_tokens": self.max_tokens,
        }
        server = ChatServer(self.url, KEY, self.timeout, self.attempts, self.backoff)
        try:
            async with in_turn("judge", self.max_concurrent):
                return await server.ask(question, lambda completion: read(completion.text))
        except RefusedError as error:
            raise EnvError(f"the judge at {self.url} refused the question: {error}") from None
        except AskAgainError as error:
            times = "once" if self.attempts == 1 else f"{self.attempts} times"
            raise EnvError(
                f"the judge at {self.url} was asked {times} and gave no {what}: {error}"
            ) from None


@chz.chz
class Judge(JudgeServer, Reward):
    """A language model's mark as a share of the best one."""

    template: str = chz.field(
        default=TEMPLATE, doc="the message; {text} is the answer, and {name} a field of the row"
    )
    best: float = chz.field(default=10.0, doc="the best mark, which gives 1; the worst is 0")

    @chz.validate
    def _valid(self) -> None:
        if f"{{{TEXT}}}" not in self.template:
            raise ConfigError("template must have {text}, where the model's answer goes")
        check_range(self, "best", above=0)

    @override
    def __call__(self, text: str, row: Fields) -> float:
        """Ask and wait; an Env calls `grade`, which does not block."""
        return anyio.run(self.grade, text, row)

    @override
    async def grade(self, text: str, row: Fields) -> float:
        """Return the mark's share of the best.

        Raises:
            EnvError: All attempts failed, or the server refused.
        """
        message = filled_message(self.template, {TEXT: spoken(text)}, row)
        mark = functools.partial(mark_in, best=self.best)
        return await self.reply(message, mark, "mark") / self.best

    @override
    def check_row(self, row: Fields) -> None:
        filled_message(self.template, {TEXT: ""}, row)


def filled_message(template: str, answers: Mapping[str, str], row: Fields) -> str:
    """Fill a template with answers and fields of the row, in one pass: names in them stay.

    >>> filled_message("{question} {text}", {"text": "{question}"}, {"question": "6 * 7?"})
    '6 * 7? {question}'

    Raises:
        DataError: The row lacks a field.
    """

    def value(found: re.Match[str]) -> str:
        return answers[found[1]] if found[1] in answers else text_of(row, found[1])

    return re.sub(r"\{([A-Za-z_]\w*)\}", value, template)


_WORDS = (
    r"(?:no|so|my|the|an?|i|i'd|its?|this|that|is|of|overall|final|total|answer|score|rating|rate|mark"
    r"|grade|give|award|deserves|gets|as|points?|stars?)"
)
_MARK = re.compile(
    rf"\W*(?:{_WORDS}\W+)*(?<![-\w])(-?\d{{1,6}}(?:\.\d{{1,3}}|,\d{{1,2}})?)(?: ?{_WORDS})?"
    r"(?: ?(?:/|\(?(?:out )?of(?: at most)?|on (?:a|the) scale (?:of|from)(?: [01] ?(?:to|-|–))?)"
    r" ?(\d{1,6}))?[^\w%]*",
    re.IGNORECASE,
)
_NAMES = re.compile(
    r"\b(?:score|rating|rate|mark|grade|give|award|deserves|gets|points?|stars?)\b", re.IGNORECASE
)
_LIST = re.compile(r"^[^\w\n]*\d{1,2}[.)] +(?=\S)", re.MULTILINE)
"""The number of a reason in a list of them."""


def mark_in(said: str, best: float) -> float:
    """Return the one mark that a judge's reply gives, outside of thoughts.

    It is a whole line or sentence, alone or with words that only name it (`Score: 8`, `I give it
    8.`), perhaps before the best one (`8/10`, `8 out of 10`, `8 on a scale from 0 to 10`). Numbers
    of a list, and of what the answer is, are not marks.

    >>> mark_in("**9 / 10**", 10), mark_in("I give it 8. It has 2 mistakes.", 10)
    (9.0, 8.0)

    Raises:
        AskAgainError: There is none from 0 to `best`, there are several, or another is the best.
    """
    plain = re.sub(r"[*_`#]+|\\boxed", " ", spoken(said)[-_LONGEST_REPLY:])
    pieces = re.split(r"\n|(?<=[.!?;])\s", _LIST.sub("", plain))
    texts = (" ".join(each.split()) for each in pieces if each.strip())
    found = [
        mark
        for mark in map(_MARK.fullmatch, texts)
        if mark and (mark[2] or _NAMES.search(mark[0]) or not re.search("[A-Za-z]", mark[0]))
    ]
    if any(mark[2] and float(mark[2]) != best for mark in found):
        raise AskAgainError(f"a mark of another best than {best:g} in {said!r:.60}")
    marks = {float(mark[1].replace(",", ".")) for mark in found}
    if len(marks) != 1 or not 0 <= min(marks) <= best:
        raise AskAgainError(f"no single mark from 0 to {best:g} in {said!r:.60}")
    return marks.pop()
