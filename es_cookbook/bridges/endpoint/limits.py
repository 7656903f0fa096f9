"""What the holder of a key may have under way, counted before anything is made for it.

A request of a few bytes can ask for any number of answers, each of which is a task, a prompt in an
engine's queue and a text: so it is their number that is limited, and not that of requests.
"""

import contextlib
from collections.abc import Generator

from es_cookbook.bridges.endpoint.requests import RefusedRequest
from es_cookbook.common.terminal import plural

MOST_UNDER_WAY = 4096
"""Answers: 16 batches of 256 at once. They take 10 KB each while they wait."""


class UnderWay:
    """The answers that a key has asked for and not got yet.

    Args:
        most: of them at once.
    """

    def __init__(self, most: int = MOST_UNDER_WAY) -> None:
        self._most, self._now = most, 0

    @contextlib.contextmanager
    def admit(self, answers: int) -> Generator[None]:
        """Inside, a request's answers are under way.

        Raises:
            RefusedRequest: They are too many, by themselves or with those of other requests.
        """
        if answers > self._most:
            raise RefusedRequest(
                f"the request asks for {answers} answers, and a key may have {self._most} under "
                "way at once; send fewer prompts, or a smaller n"
            )
        if answers > self._most - self._now:
            raise RefusedRequest(
                f"{plural(self._now, 'answer')} of this key are under way, and {self._most} may be "
                f"at once; send the request for {plural(answers, 'answer')} again when there are "
                "fewer",
                status=429,
                code="rate_limit_exceeded",
            )
        self._now += answers
        try:
            yield
        finally:
            self._now -= answers
