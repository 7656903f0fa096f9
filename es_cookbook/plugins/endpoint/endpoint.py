"""Maps API keys to the models that answer their requests: the interface of the application."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager

from es_cookbook.common.errors import nearest
from es_cookbook.engines.base import Progress, Top
from es_cookbook.plugins.endpoint.limits import PendingAnswers
from es_cookbook.plugins.endpoint.requests import Draw, RefusedRequest
from es_cookbook.plugins.endpoint.translator import Answer, Prompt, Translator
from es_cookbook.rl.messages.chat import KeptTurns
from es_cookbook.rl.messages.message import Message
from es_cookbook.rl.types import Action, Observation


class ServedModel(ABC):
    """A model that answers the requests of one key.

    Attributes:
        translator: translator for its tokenizer.
        kept: its earlier answers to this key.
        pending: the key's pending answers, of all models.
        chat_stop, text_stop: strings that end an answer to a chat, or to a text, if the request
            has no `stop`.
    """

    translator: Translator
    kept: KeptTurns
    pending: PendingAnswers
    chat_stop: tuple[str, ...] = ()
    text_stop: tuple[str, ...] = ()

    def admit(self, answers: int) -> AbstractContextManager[None]:
        """Return a context manager, which is held while a request is worked on.

        Args:
            answers: number of answers to all of its prompts.

        Raises:
            RefusedRequest: They are too many, in this request or with other pending ones.
        """
        return self.pending.admit(answers)

    @abstractmethod
    async def sample(
        self, observation: Observation, draw: Draw, number: int, progress: Progress
    ) -> Action:
        """Return one answer; `number` is its index among the answers to a request.

        Raises:
            RefusedRequest: It cannot be answered.
        """

    async def tops(self, tokens_T: tuple[int, ...]) -> Sequence[Top]:
        """Return the most probable tokens in place of each token after the first.

        Raises:
            RefusedRequest: They are not known.
        """
        raise RefusedRequest("echo goes without logprobs here", param="echo")

    def answered(self, prompt: Prompt, chat: Sequence[Message], answers: Sequence[Answer]) -> None:
        """Keep the answers to a chat, which may continue from any of them."""
        if prompt.renderer and not prompt.opening:  # An opening was given, and not sampled.
            for answer in answers:
                turns = (*chat, answer.turn)
                self.kept.keep(prompt.renderer, turns, prompt.tokens_T, answer.action)


class Endpoint(ABC):
    """Maps keys to models."""

    @abstractmethod
    def check(self, key: str) -> None:
        """Check a key, before the rest of a request is read.

        Raises:
            RefusedRequest: The key is unknown.
        """

    @abstractmethod
    def names(self, key: str) -> Sequence[str]:
        """Return the models of a key that was checked."""

    @abstractmethod
    def model(self, key: str, name: str) -> ServedModel:
        """Return a model of `names`.

        Raises:
            RefusedRequest: There is no model of this name, or the key is unknown.
        """


def check_name(name: str, names: Sequence[str]) -> None:
    """Refuse a model that is not one of these."""
    if name not in names:
        raise RefusedRequest(
            f"the model {name[:60]!r} is not served; {nearest(name, names)}",
            status=404,
            param="model",
            code="model_not_found",
        )


def wrong_key(
    why: str = "the key is wrong: send what the server printed, as `Authorization: Bearer KEY`",
) -> RefusedRequest:
    return RefusedRequest(why, status=401, code="invalid_api_key")
