"""A judge behind an OpenAI-compatible HTTP server: asked in one chat message, until it answers.

How it is asked again stands in `es_cookbook.common.servers.chat`. Without a usable reply in the end
the judgement is lost: a judge's failure is no evidence about a genome.

Left out: streaming, and keys in configs, which are recorded and shared. The key is taken from the
environment, from `ES_COOKBOOK_JUDGE_KEY` alone.
"""

import re
from collections.abc import Callable
from typing import TypeVar

import anyio
import chz
from anyio.lowlevel import RunVar

from es_cookbook.common.checks import check_range
from es_cookbook.common.errors import ConfigError, EnvError
from es_cookbook.common.fields.reach import address_of, needs_trust
from es_cookbook.common.servers.chat import AskAgainError, RefusedError, asked, completion
from es_cookbook.common.servers.http import key_in
from es_cookbook.rl.timeouts import nobody_has_control

KEY = "ES_COOKBOOK_JUDGE_KEY"
"""Environment variable with the server's key, if it needs one."""
_limiters: RunVar[dict[int, anyio.CapacityLimiter]] = RunVar("_limiters")
_T = TypeVar("_T")


def _address(judge: "JudgeServer") -> str | None:
    """Whom it asks; nobody without a model, as the judge of a sum that has none."""
    return address_of(judge.url) if judge.model else None


@chz.chz
class JudgeServer:
    """Which server and model judge, and how they are asked."""

    url: str = chz.field(
        default="http://127.0.0.1:8000/v1",
        doc="of an OpenAI-compatible server, up to /v1",
        metadata=needs_trust(
            _address, f"is where questions go, with the key in {KEY} if there is one"
        ),
    )
    model: str = chz.field(default="", doc="the server's name for the judge; needed")
    temperature: float = chz.field(default=0.0, doc="of the judge's sampling")
    max_tokens: int = chz.field(default=256, doc="most tokens of the judge's reply")
    timeout: float = chz.field(default=15.0, doc="seconds for one reply")
    attempts: int = chz.field(default=3, doc="how often a judge that fails is asked")
    backoff: float = chz.field(
        default=0.5, doc="seconds before asking again; doubled each further time"
    )
    max_concurrent: int = chz.field(default=32, doc="most questions at a time")

    @chz.validate
    def _server(self) -> None:
        if not re.match(r"https?://[^/\s]", self.url):
            raise ConfigError(f"url must begin with http:// or https://, found {self.url!r}")
        check_range(self, "timeout", above=0)
        check_range(self, "temperature", "backoff", at_least=0)
        check_range(self, "max_tokens", "attempts", "max_concurrent", at_least=1)

    async def reply(self, message: str, read: Callable[[str], _T], what: str) -> _T:
        """What `read` finds in the judge's reply to a message.

        Args:
            message: what the judge is asked.
            read: raises `AskAgainError` where a reply is of no use.
            what: what the reply should have held, for the sentence.

        Raises:
            EnvError: Nothing after all attempts, or a refusal that another would not change.
        """
        if not self.model:
            raise EnvError(f"the judge at {self.url} needs a model, and is not asked without one")
        with nobody_has_control():  # A queue is not this rollout's fault.
            limiter = self._limiter()
            await limiter.acquire()
        try:
            return await self._read(message, read, what)
        finally:
            limiter.release()

    async def _read(self, message: str, read: Callable[[str], _T], what: str) -> _T:
        question = {
            "model": self.model,
            "messages": [{"role": "user", "content": message}],
            "temperature": self.temperature,
            "max_tokens": self.max_tokens,
        }

        async def ask() -> _T:
            return read((await completion(self.url, key_in(KEY), question, self.timeout)).text)

        try:
            return await asked(ask, self.attempts, self.backoff)
        except RefusedError as error:
            raise EnvError(f"the judge at {self.url} refused the question: {error}") from None
        except AskAgainError as error:
            times = "once" if self.attempts == 1 else f"{self.attempts} times"
            raise EnvError(
                f"the judge at {self.url} was asked {times} and gave no {what}: {error}"
            ) from None

    def _limiter(self) -> anyio.CapacityLimiter:
        """One for all judges with the same limit on this event loop."""
        limiters = _limiters.get({})
        _limiters.set(limiters)
        return limiters.setdefault(self.max_concurrent, anyio.CapacityLimiter(self.max_concurrent))
