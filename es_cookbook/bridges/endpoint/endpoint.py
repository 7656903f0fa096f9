"""Who answers the requests of whom: what the application asks for."""

import hmac
from abc import ABC, abstractmethod
from collections.abc import Sequence

from es_cookbook.bridges.endpoint.requests import Draw, RefusedRequest
from es_cookbook.bridges.endpoint.translator import Translator
from es_cookbook.rl.messages.chat import KeptTurns
from es_cookbook.rl.types import Action, Observation


class Speaker(ABC):
    """A model that answers the holder of a key.

    Attributes:
        translator: of its tokenizer.
        kept: what it has answered this holder.
    """

    translator: Translator
    kept: KeptTurns

    @abstractmethod
    async def sample(self, observation: Observation, draw: Draw, number: int) -> Action:
        """One answer; `number` counts those to one request.

        Raises:
            RefusedRequest: It cannot be answered.
        """


class Endpoint(ABC):
    """Who answers whom."""

    @abstractmethod
    def names(self, key: str) -> Sequence[str]:
        """The models that this key opens.

        Raises:
            RefusedRequest: It opens nothing.
        """

    @abstractmethod
    async def speaker(self, key: str, name: str) -> Speaker:
        """A model of `names`."""


class OneKey:
    """A key that opens everything, compared in constant time."""

    def __init__(self, key: str) -> None:
        self._key = key.encode()

    def check(self, key: str) -> None:
        """Raises RefusedRequest for another."""
        if not hmac.compare_digest(key.encode(), self._key):
            raise wrong_key()


def wrong_key() -> RefusedRequest:
    return RefusedRequest(
        "the key is wrong: send the one that the server printed, as `Authorization: Bearer KEY`",
        status=401,
        code="invalid_api_key",
    )
