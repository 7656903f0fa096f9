"""Questions to a chat server, and how often they are repeated."""

import re
from typing import Literal, TypeAlias

import chz

from es_cookbook.common.checks import check_range
from es_cookbook.common.errors import ConfigError, ServerError
from es_cookbook.plugins.judges.chat import AskAgainError, ChatServer, Completion, RefusedError
from es_cookbook.rl.data.rows import check_template
from es_cookbook.rl.types import SOURCE_DOC

Question: TypeAlias = tuple[str, str, int | None]
"""A question: the key of its answer, the prompt, and the seed; None: the server's own."""
Outcome: TypeAlias = Completion | str
"""An answer, or the reason why there is none."""

KEY = "ES_COOKBOOK_GENERATE_KEY"
"""Environment variable with the server's key, if it needs one; no other is sent."""
_FOR_ALL = (401, 403, 404, 405)
"""Statuses of a refused key or an unknown model, which concern all questions."""
HOW = "generated"
"""Field of the output that says how its answer was made."""


@chz.chz
class GenerateConfig:
    """Write rows to train on: a language model's answers to prompts made from rows."""

    model: str = chz.field(doc="the server's name for the model")
    base_url: str = chz.field(
        default="http://127.0.0.1:8000/v1", doc="URL of an OpenAI-compatible server, up to /v1"
    )
    system: str = chz.field(default="", doc="system message; empty: none")
    temperature: float = chz.field(default=0.7, doc="sampling temperature")
    top_p: float = chz.field(default=1.0, doc="nucleus sampling: probability mass to sample from")
    max_tokens: int = chz.field(default=512, doc="maximum tokens per answer")
    timeout: float = chz.field(default=120.0, doc="seconds per attempt")
    attempts: int = chz.field(default=5, doc="maximum attempts per question")
    backoff: float = chz.field(
        default=1.0,
        doc="seconds before the second attempt, doubled each time, unless the server says more",
    )

    source: str = chz.field(doc=SOURCE_DOC)
    output: str = chz.field(doc=".jsonl file to write; one with the same settings is continued")
    prompt: str = chz.field(default="{question}", doc="template, with fields of the row in braces")
    replicas: int = chz.field(default=1, doc="answers per prompt")
    num_rows: int | None = chz.field(default=None, doc="rows to use, from the first; None: all")
    seed: int | None = chz.field(
        default=0, doc="seed from which each question's is derived; None sends none"
    )
    prompt_field: str = chz.field(default="prompt", doc="output field for the prompt")
    completion_field: str = chz.field(default="completion", doc="output field for the answer")
    concurrency: int = chz.field(default=32, doc="maximum number of concurrent questions")
    via: Literal["openai", "distilabel"] = chz.field(
        default="openai", doc="what sends the questions: this process, or a distilabel pipeline"
    )

    @chz.validate
    def _valid(self) -> None:
        if not re.match(r"https?://[^/\s@]+(/|$)", self.base_url):
            raise ConfigError(
                f"base_url must begin with http:// or https:// and a host, found {self.base_url!r}"
            )
        check_range(self, "temperature", "backoff", at_least=0)
        check_range(self, "timeout", above=0)
        check_range(self, "top_p", above=0, at_most=1)
        counts = ("max_tokens", "attempts", "replicas", "num_rows", "concurrency")
        check_range(self, *counts, at_least=1)
        check_template(self.prompt)
        if len({self.prompt_field, self.completion_field, HOW}) < 3:
            raise ConfigError(
                f"prompt_field={self.prompt_field} and completion_field={self.completion_field} "
                f"must differ, and from {HOW!r}, which the output has as well"
            )
        if not self.output.endswith(".jsonl"):
            raise ConfigError(f"output must be a file that ends in .jsonl, found {self.output!r}")
        if self.replicas > 1 and self.temperature == 0:
            raise ConfigError(
                f"replicas={self.replicas} with temperature=0 asks for the same answer again; "
                "raise the temperature, or give replicas=1"
            )


async def answer_to(config: GenerateConfig, prompt: str, seed: int | None) -> Outcome:
    """Ask a question, again after failures that may pass.

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
    server = ChatServer(config.base_url, KEY, config.timeout, config.attempts, config.backoff)
    try:
        return await server.ask(question, lambda completion: completion)
    except AskAgainError as error:
        return str(error)
    except RefusedError as error:
        if error.status < 400 or error.status in _FOR_ALL:
            raise ServerError(
                f"the server at {config.base_url} refuses to answer: {error}"
            ) from None
        return str(error)
