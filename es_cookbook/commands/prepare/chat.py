"""One answer of a model behind an OpenAI-compatible server, asked for until there is one.

A server that is slow, overloaded, unreachable or answers with something else is asked again, each
time after twice the wait, or after what it says itself (`Retry-After`). What a repetition would not
change is not repeated: a refused key or an unknown model concerns every question, a prompt that is
too long only itself.

The client is openai's `AsyncOpenAI`; the loop is ours, because the client's own repeats what comes
back as an error and takes everything else as an answer.
"""

import dataclasses
import os
import re
from email.utils import parsedate_to_datetime
from time import time
from typing import TYPE_CHECKING, NamedTuple, cast

import anyio
import chz

from es_cookbook.common.checks import check_range
from es_cookbook.common.errors import ConfigError, ServerError, not_installed

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletionMessageParam

KEY = "ES_COOKBOOK_GENERATE_KEY"
"""Environment variable with the server's key, if it needs one; no other is sent."""
LONGEST_WAIT = 60.0
"""Seconds between two attempts, whatever the server wishes."""
_FOR_ALL = (401, 403, 404, 405)
_TOO_EARLY = (408, 409, 425, 429)


class LostAnswerError(Exception):
    """No answer to a question; its argument says why."""


class _AgainError(Exception):
    """What may be better the next time.

    Args:
        why: in a few words.
        wait: seconds that the server asks for.
    """

    def __init__(self, why: str, wait: float = 0.0) -> None:
        super().__init__(why)
        self.wait = wait


@dataclasses.dataclass(frozen=True)
class Answer:
    """What the model wrote, and why it stopped: "stop", "length" and so on."""

    text: str
    finish_reason: str | None


class Asked(NamedTuple):
    """One question.

    Attributes:
        key: names its answer.
        prompt: what is asked.
        seed: of the sampling; None: the server's own.
    """

    key: str
    prompt: str
    seed: int | None


@chz.chz
class ChatConfig:
    """Which model is asked, and how."""

    model: str = chz.field(doc="the server's name for the model")
    base_url: str = chz.field(
        default="http://127.0.0.1:8000/v1", doc="of an OpenAI-compatible server, up to /v1"
    )
    system: str = chz.field(default="", doc="system message before the prompt; empty: none")
    temperature: float = chz.field(default=0.7, doc="of the sampling")
    top_p: float = chz.field(default=1.0, doc="share of the probability that is sampled from")
    max_tokens: int = chz.field(default=512, doc="most tokens of an answer")
    timeout: float = chz.field(default=120.0, doc="seconds for one attempt at an answer")
    attempts: int = chz.field(default=5, doc="how often a question is asked until it is answered")
    backoff: float = chz.field(
        default=1.0, doc="seconds before asking again, or what the server says; doubled each time"
    )

    @chz.validate
    def _ways_to_ask(self) -> None:
        if not re.match(r"https?://[^/\s@]+(/|$)", self.base_url):
            raise ConfigError(
                f"base_url must begin with http:// or https:// and a host, found {self.base_url!r}"
            )
        check_range(self, "temperature", "backoff", at_least=0)
        check_range(self, "timeout", above=0)
        check_range(self, "top_p", above=0, at_most=1)
        check_range(self, "max_tokens", "attempts", at_least=1)


class Chat:
    """A conversation of one question and one answer, any number of times.

    Raises:
        ConfigError: The package `openai` is not installed.
    """

    def __init__(self, config: ChatConfig) -> None:
        try:
            import openai
        except ImportError as error:
            raise not_installed("generate", "openai", "es-cookbook[generate]") from error
        self._config = config
        self._openai = openai
        key = os.environ.get(KEY)
        self._headers = {} if key else {"Authorization": openai.omit}
        self._client = openai.AsyncOpenAI(
            base_url=config.base_url,
            api_key=key or "none",  # None would be looked for in other places.
            timeout=config.timeout,
            max_retries=0,
            # A key that was meant for one server goes to no other.
            http_client=openai.DefaultAsyncHttpxClient(follow_redirects=False),
        )

    async def answer(self, prompt: str, seed: int | None) -> Answer:
        """Ask, several times if need be.

        Raises:
            LostAnswerError: There is no answer to this question.
            ServerError: There will be none to any.
        """
        attempts, why = self._config.attempts, ""
        for attempt in range(1, attempts + 1):
            try:
                return await self._asked(prompt, seed)
            except _AgainError as error:
                why = str(error)
                if attempt < attempts:
                    wait = max(error.wait, self._config.backoff * 2 ** (attempt - 1))
                    await anyio.sleep(min(wait, LONGEST_WAIT))
        raise LostAnswerError(why)

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()

    async def _asked(self, prompt: str, seed: int | None) -> Answer:
        config, openai = self._config, self._openai
        messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": prompt}]
        if config.system:
            messages.insert(0, {"role": "system", "content": config.system})
        try:
            with anyio.fail_after(config.timeout):  # The client's own starts again at each byte.
                reply = await self._client.chat.completions.create(
                    model=config.model,
                    messages=messages,
                    temperature=config.temperature,
                    top_p=config.top_p,
                    max_tokens=config.max_tokens,
                    seed=openai.omit if seed is None else seed,
                    extra_headers=self._headers,
                )
            return _answer_in(reply)
        except (TimeoutError, openai.APITimeoutError):
            raise _AgainError(f"no reply within {config.timeout:g} s") from None
        except openai.APIStatusError as error:
            said = " ".join(error.response.text[:200].split())
            what = f"HTTP {error.status_code}: {said}".removesuffix(": ")
            if error.status_code < 400 or error.status_code in _FOR_ALL:
                raise ServerError(
                    f"the server at {config.base_url} refuses to answer: {what}"
                ) from None
            if error.status_code < 500 and error.status_code not in _TOO_EARLY:
                raise LostAnswerError(what) from None
            wait = _seconds(error.response.headers.get("retry-after", ""))
            raise _AgainError(what, wait) from None
        except openai.APIConnectionError as error:
            cause = error.__cause__ or error
            raise _AgainError(f"{type(cause).__name__}: {cause}".removesuffix(": ")) from None
        # What the client makes of a reply that is none; it checks no types.
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            raise _AgainError("a reply that is no chat completion") from None


def _answer_in(reply: object) -> Answer:
    """The answer of what should be a `ChatCompletion`, whatever it is."""
    choice = reply.choices[0]  # pyright: ignore[reportAttributeAccessIssue]
    text, finish_reason = cast(object, choice.message.content), cast(object, choice.finish_reason)
    if not isinstance(text, str) or not text.strip():
        raise _AgainError(f"an answer without text: {text!r:.40}")
    return Answer(text, finish_reason if isinstance(finish_reason, str) else None)


def _seconds(retry_after: str) -> float:
    """What a `Retry-After` header asks for: seconds, or a time of day; 0 for what is neither."""
    try:
        return max(0.0, float(retry_after))
    except ValueError:
        pass
    try:
        return max(0.0, parsedate_to_datetime(retry_after).timestamp() - time())
    except (ValueError, TypeError):
        return 0.0
