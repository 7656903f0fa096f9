"""One answer of a model behind an OpenAI-compatible server, and what is lost without one.

How it is asked again stands in `es_cookbook.common.servers.chat`. A refused key or an unknown model
concerns every question, a prompt that is too long only itself.
"""

import re
from functools import partial
from typing import TypeAlias

import chz

from es_cookbook.common.checks import check_range
from es_cookbook.common.errors import ConfigError, ServerError
from es_cookbook.common.servers.chat import (
    AskAgainError,
    Completion,
    RefusedError,
    asked,
    completion,
)
from es_cookbook.common.servers.http import key_in

KEY = "ES_COOKBOOK_GENERATE_KEY"
"""Environment variable with the server's key, if it needs one; no other is sent."""
_FOR_ALL = (401, 403, 404, 405)


Asked: TypeAlias = tuple[str, str, int | None]
"""A question: the key of its answer, the prompt, and the seed; None is the server's own."""
Outcome: TypeAlias = Completion | str
"""What came of a question: an answer, or why there is none."""


@chz.chz
class ChatConfig:
    """Which model is asked, and how."""

    model: str = chz.field(doc="the server's name for the model")
    base_url: str = chz.field(
        default="http://127.0.0.1:8000/v1", doc="URL of an OpenAI-compatible server, up to /v1"
    )
    system: str = chz.field(default="", doc="system message; empty: none")
    temperature: float = chz.field(default=0.7, doc="sampling temperature")
    top_p: float = chz.field(
        default=1.0, doc="nucleus sampling: cumulative probability to sample from"
    )
    max_tokens: int = chz.field(default=512, doc="maximum tokens per answer")
    timeout: float = chz.field(default=120.0, doc="seconds per attempt")
    attempts: int = chz.field(default=5, doc="maximum attempts per question")
    backoff: float = chz.field(
        default=1.0,
        doc="seconds before the second attempt, doubled each time, unless the server says more",
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


async def answer_to(config: ChatConfig, prompt: str, seed: int | None) -> Outcome:
    """Ask, several times if need be.

    Raises:
        ConfigError: The key cannot be in a header.
        ServerError: There will be no answer to any question.
    """
    messages = [{"role": "system", "content": config.system}] if config.system else []
    messages.append({"role": "user", "content": prompt})
    sent = ("model", "temperature", "top_p", "max_tokens")
    question = {"messages": messages, **{name: getattr(config, name) for name in sent}}
    if seed is not None:
        question["seed"] = seed
    ask = partial(completion, config.base_url, key_in(KEY), question, config.timeout)
    try:
        return await asked(ask, config.attempts, config.backoff)
    except AskAgainError as error:
        return str(error)
    except RefusedError as error:
        if error.status < 400 or error.status in _FOR_ALL:
            raise ServerError(
                f"the server at {config.base_url} refuses to answer: {error}"
            ) from None
        return str(error)
