"""A mark from a language model behind an OpenAI-compatible HTTP server, as a reward.

The server gets one chat message, made of a template, the answer and the row, and answers with a
mark: the last number of its text. The reward is the mark as a share of the best one.

    reward=judge reward.url=http://127.0.0.1:8000/v1 reward.model=my-judge

A server that is slow, overloaded or talks nonsense is asked again, each time after twice the wait.
Without a mark in the end the score is lost, not 0: a judge's failure is no evidence about a genome.
The exception loses the rollout, whose reward is then NaN.

Pitfall: the time that the judge takes is the Env's, so `rollout_timeout` must allow for it. And a
policy learns to please its judge, not to be right: look at samples.

Left out: streaming, and keys in configs, which are recorded and shared. The key is taken from the
environment, from `ES_COOKBOOK_JUDGE_KEY` alone.
"""

import http.client
import json
import os
import re
import urllib.error
import urllib.request
from typing import cast

import anyio
import anyio.to_thread
import chz
from anyio.lowlevel import RunVar
from typing_extensions import override

from es_cookbook.common.checks import check_range
from es_cookbook.common.errors import ConfigError, EnvError
from es_cookbook.rl.rewards.answers import field_of
from es_cookbook.rl.rewards.base import Fields, Reward
from es_cookbook.rl.rewards.number import last_number
from es_cookbook.rl.timeouts import nobody_has_control

KEY = "ES_COOKBOOK_JUDGE_KEY"
"""Environment variable with the server's key, if it needs one."""
TEXT = "text"
"""Stands in a template for the model's answer; every other name for a field of the row."""
TEMPLATE = """\
Question:
{question}

Answer of a student:
{text}

How good is the answer? Reply with a number from 0 (worthless) to 10 (perfect), and nothing else."""

_LONGEST_REPLY = 250_000
_TOO_EARLY = (408, 425, 429)
_limiters: RunVar[dict[int, anyio.CapacityLimiter]] = RunVar("_limiters")


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A key that was meant for one server goes to no other."""

    @override
    def redirect_request(self, *args: object, **kwargs: object) -> None:
        return None


_OPENER = urllib.request.build_opener(_NoRedirects)


class AskAgainError(Exception):
    """What may be better the next time."""


@chz.chz
class Judge(Reward):
    """A language model's mark as a share of the best one."""

    url: str = chz.field(
        default="http://127.0.0.1:8000/v1", doc="of an OpenAI-compatible server, up to /v1"
    )
    model: str = chz.field(default="", doc="the server's name for the judge; needed")
    template: str = chz.field(
        default=TEMPLATE, doc="the message; {text} is the answer, and {name} a field of the row"
    )
    best: float = chz.field(default=10.0, doc="the best mark, which gives 1; the worst is 0")
    temperature: float = chz.field(default=0.0, doc="of the judge's sampling")
    max_tokens: int = chz.field(default=256, doc="most tokens of the judge's reply")
    timeout: float = chz.field(default=15.0, doc="seconds for one reply")
    attempts: int = chz.field(default=3, doc="how often a judge that fails is asked")
    backoff: float = chz.field(
        default=0.5, doc="seconds before asking again; doubled each further time"
    )
    max_concurrent: int = chz.field(default=32, doc="most questions at a time")

    @chz.validate
    def _valid(self) -> None:
        if not re.match(r"https?://[^/\s]", self.url):
            raise ConfigError(f"url must begin with http:// or https://, found {self.url!r}")
        if f"{{{TEXT}}}" not in self.template:
            raise ConfigError("template must have {text}, where the model's answer goes")
        check_range(self, "best", "timeout", above=0)
        check_range(self, "temperature", "backoff", at_least=0)
        check_range(self, "max_tokens", "attempts", "max_concurrent", at_least=1)

    @override
    def __call__(self, text: str, row: Fields) -> float:
        """Ask here and now, blocking; in an Env `grade` does not."""
        return anyio.run(self.grade, text, row)

    @override
    async def grade(self, text: str, row: Fields) -> float:
        """The mark's share of the best.

        Raises:
            EnvError: No mark after all attempts, or a refusal that another would not change.
        """
        body = self._body(text, row)
        with nobody_has_control():  # A queue is not this rollout's fault.
            limiter = self._limiter()
            await limiter.acquire()
        try:
            return await self._mark(body) / self.best
        finally:
            limiter.release()

    @override
    def check(self) -> None:
        if not self.model:
            raise ConfigError("reward=judge needs a model: the name of one that the server has")

    @override
    def check_row(self, row: Fields) -> None:
        self._message("", row)

    async def _mark(self, body: bytes) -> float:
        said = ""
        for attempt in range(self.attempts):
            if attempt:
                await anyio.sleep(self.backoff * 2 ** (attempt - 1))
            try:
                with anyio.fail_after(self.timeout):
                    reply = await anyio.to_thread.run_sync(
                        self._asked,
                        body,
                        abandon_on_cancel=True,
                        limiter=anyio.CapacityLimiter(1),
                    )
                return mark_in(reply, self.best)
            except TimeoutError:
                said = f"no reply within {self.timeout:g} s"
            except AskAgainError as error:
                said = str(error)
        times = "once" if self.attempts == 1 else f"{self.attempts} times"
        raise EnvError(f"the judge at {self.url} was asked {times} and gave no mark: {said}")

    def _asked(self, body: bytes) -> bytes:
        """The server's reply to one question, from a thread."""
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get(KEY):
            headers["Authorization"] = f"Bearer {key}"
        request = urllib.request.Request(f"{self.url.rstrip('/')}/chat/completions", body, headers)
        try:
            with _OPENER.open(request, timeout=self.timeout) as reply:
                return cast(bytes, reply.read(_LONGEST_REPLY))
        except urllib.error.HTTPError as error:
            said = " ".join(error.read(200).decode(errors="replace").split())
            what = f"HTTP {error.code} {error.reason}: {said}".removesuffix(": ")
            if error.code < 500 and error.code not in _TOO_EARLY:
                raise EnvError(f"the judge at {self.url} refused the question: {what}") from None
            raise AskAgainError(what) from None
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            raise AskAgainError(f"{type(reason).__name__}: {reason}".removesuffix(": ")) from None

    def _body(self, text: str, row: Fields) -> bytes:
        question = {
            "model": self.model,
            "messages": [{"role": "user", "content": self._message(text, row)}],
            "temperature": self.temperature,
            "max_tokens": self.max_tokens,
        }
        return json.dumps(question).encode()

    def _message(self, text: str, row: Fields) -> str:
        """The template, filled in one pass: what looks like a name in an answer stays."""

        def value(found: re.Match[str]) -> str:
            return text if found[1] == TEXT else str(field_of(row, found[1]))

        return re.sub(r"\{([A-Za-z_]\w*)\}", value, self.template)

    def _limiter(self) -> anyio.CapacityLimiter:
        """One for all judges with the same limit on this event loop."""
        limiters = _limiters.get({})
        _limiters.set(limiters)
        return limiters.setdefault(self.max_concurrent, anyio.CapacityLimiter(self.max_concurrent))


def mark_in(reply: bytes, best: float) -> float:
    """The mark in a server's reply, a chat completion: the last number of its text.

    Raises:
        AskAgainError: There is none from 0 to `best`, or the reply is something else.
    """
    try:
        content = json.loads(reply)["choices"][0]["message"]["content"]
    except (ValueError, LookupError, TypeError, RecursionError):
        raise AskAgainError(f"a reply that is no chat completion: {reply[:60]!r}") from None
    mark = last_number(content) if isinstance(content, str) else None
    if mark is None or not 0 <= mark <= best:
        raise AskAgainError(f"no mark from 0 to {best:g} in {content!r:.60}")
    return float(mark)
