"""A judge behind an OpenAI-compatible HTTP server: asked in one chat message, until it answers.

A server that is slow, overloaded or talks nonsense is asked again, each time after twice the wait.
Without a usable reply in the end the judgement is lost: a judge's failure is no evidence about a
genome.

Left out: streaming, and keys in configs, which are recorded and shared. The key is taken from the
environment, from `ES_COOKBOOK_JUDGE_KEY` alone.
"""

import http.client
import json
import os
import re
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import TypeVar, cast

import anyio
import anyio.to_thread
import chz
from anyio.lowlevel import RunVar
from typing_extensions import override

from es_cookbook.common.checks import check_range
from es_cookbook.common.errors import ConfigError, EnvError
from es_cookbook.rl.timeouts import nobody_has_control

KEY = "ES_COOKBOOK_JUDGE_KEY"
"""Environment variable with the server's key, if it needs one."""
_LONGEST_REPLY = 250_000
_TOO_EARLY = (408, 425, 429)
_limiters: RunVar[dict[int, anyio.CapacityLimiter]] = RunVar("_limiters")
_T = TypeVar("_T")


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A key that was meant for one server goes to no other."""

    @override
    def redirect_request(self, *args: object, **kwargs: object) -> None:
        return None


_OPENER = urllib.request.build_opener(_NoRedirects)


class AskAgainError(Exception):
    """What may be better the next time."""


@chz.chz
class JudgeServer:
    """Which server and model judge, and how they are asked."""

    url: str = chz.field(
        default="http://127.0.0.1:8000/v1", doc="of an OpenAI-compatible server, up to /v1"
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
        body = self._body(message)
        with nobody_has_control():  # A queue is not this rollout's fault.
            limiter = self._limiter()
            await limiter.acquire()
        try:
            return await self._read(body, read, what)
        finally:
            limiter.release()

    async def _read(self, body: bytes, read: Callable[[str], _T], what: str) -> _T:
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
                return read(text_of(reply))
            except TimeoutError:
                said = f"no reply within {self.timeout:g} s"
            except AskAgainError as error:
                said = str(error)
        times = "once" if self.attempts == 1 else f"{self.attempts} times"
        raise EnvError(f"the judge at {self.url} was asked {times} and gave no {what}: {said}")

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

    def _body(self, message: str) -> bytes:
        question = {
            "model": self.model,
            "messages": [{"role": "user", "content": message}],
            "temperature": self.temperature,
            "max_tokens": self.max_tokens,
        }
        return json.dumps(question).encode()

    def _limiter(self) -> anyio.CapacityLimiter:
        """One for all judges with the same limit on this event loop."""
        limiters = _limiters.get({})
        _limiters.set(limiters)
        return limiters.setdefault(self.max_concurrent, anyio.CapacityLimiter(self.max_concurrent))


def text_of(reply: bytes) -> str:
    """The text of a server's reply, a chat completion.

    Raises:
        AskAgainError: The reply is something else.
    """
    try:
        content = json.loads(reply)["choices"][0]["message"]["content"]
    except (ValueError, LookupError, TypeError, RecursionError):
        raise AskAgainError(f"a reply that is no chat completion: {reply[:60]!r}") from None
    return content if isinstance(content, str) else ""
