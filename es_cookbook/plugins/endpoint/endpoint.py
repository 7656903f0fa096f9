"""Who answers the requests of whom: what the application asks for."""

import hmac
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager

from es_cookbook.common.errors import nearest
from es_cookbook.engines.base import Progress, Top
from es_cookbook.plugins.endpoint.limits import UnderWay
from es_cookbook.plugins.endpoint.requests import Draw, RefusedRequest
from es_cookbook.plugins.endpoint.translator import Answer, Prompt, Translator
from es_cookbook.rl.messages.chat import KeptTurns
from es_cookbook.rl.messages.message import Message
from es_cookbook.rl.types import Action, Observation


class Speaker(ABC):
    """A model that answers the holder of a key.

    Attributes:
        translator: of its tokenizer.
        kept: what it has answered this holder.
        under_way: what this holder has asked for and not got yet, of all models together.
        tells: its `sample` tells of its progress, so that a stream begins before its end.
        chat_stop, text_stop: strings that end an answer to a chat, or to a text, where the request
            says nothing of any.
    """

    translator: Translator
    kept: KeptTurns
    under_way: UnderWay
    tells = False
    chat_stop: tuple[str, ...] = ()
    text_stop: tuple[str, ...] = ()

    def admit(self, answers: int) -> AbstractContextManager[None]:
        """Entered before anything is made for a request, and left when it is over.

        Args:
            answers: that the request asks for, to all of its prompts.

        Raises:
            RefusedRequest: They are more than there may be, ever or at once.
        """
        return self.under_way.admit(answers)

    @abstractmethod
    async def sample(
        self, observation: Observation, draw: Draw, number: int, progress: Progress
    ) -> Action:
        """One answer; `number` counts those to one request.

        Raises:
            RefusedRequest: It cannot be answered.
        """

    async def tops(self, tokens_T: tuple[int, ...]) -> Sequence[Top]:
        """Of the tokens behind the first one.

        Raises:
            RefusedRequest: They are not told.
        """
        raise RefusedRequest("echo goes without logprobs here", param="echo")

    def answered(self, prompt: Prompt, chat: Sequence[Message], answers: Sequence[Answer]) -> None:
        """A chat's answers are about to be sent; it may go on from any of them."""
        if prompt.renderer and not prompt.opening:  # Else a beginning was given, and not sampled.
            for answer in answers:
                turns = (*chat, answer.turn)
                self.kept.keep(prompt.renderer, turns, prompt.tokens_T, answer.action)


class Endpoint(ABC):
    """Who answers whom."""

    @abstractmethod
    def check(self, key: str) -> None:
        """Asked before anything else of a request is read.

        Raises:
            RefusedRequest: The key opens nothing.
        """

    @abstractmethod
    def names(self, key: str) -> Sequence[str]:
        """The models that this key opens.

        Raises:
            RefusedRequest: It opens nothing.
        """

    @abstractmethod
    async def speaker(self, key: str, name: str) -> Speaker:
        """A model of `names`.

        Raises:
            RefusedRequest: There is none of this name, or the key opens nothing.
        """


class OneKey:
    """A key that opens everything, compared in constant time."""

    def __init__(self, key: str) -> None:
        self._key = key.encode()

    def check(self, key: str) -> None:
        """Raises RefusedRequest for another."""
        if not hmac.compare_digest(key.encode(), self._key):
            raise wrong_key()


def check_name(name: str, names: Sequence[str]) -> None:
    """Raises RefusedRequest for a model that is not one of these."""
    if name not in names:
        raise RefusedRequest(
            f"the model {name[:60]!r} is not served; {nearest(name, names)}",
            status=404,
            param="model",
            code="model_not_found",
        )


def wrong_key() -> RefusedRequest:
    return RefusedRequest(
        "the key is wrong: send the one that the server printed, as `Authorization: Bearer KEY`",
        status=401,
        code="invalid_api_key",
    )
