"""Limits on the cost of a request and of a key, checked before anything is sampled.

A body of a few kilobytes can ask for any number of answers, each of which is a task, a place in an
engine's queue and a text. So a key has a budget of pending answers, and a request one of tokens,
far above what evaluations and rollouts need.
"""

import contextlib
from collections.abc import Generator, Sequence

from es_cookbook.common.terminal import plural
from es_cookbook.plugins.endpoint.requests import ChatRequest, RefusedRequest, TextRequest

MOST_PENDING = 4096
"""Pending answers of a key. Each takes 10 KB while it waits."""
MOST_TOKENS = 1 << 22
"""Tokens of a request's prompts and answers: 128 answers of 32,768. They take 40 bytes each."""
MOST_LOGPROBS = 1 << 16
"""Limit on tokens with log-probabilities, each of which is an object in the reply."""


class PendingAnswers:
    """The pending answers of a key.

    Args:
        most: maximum.

    Attributes:
        answers: current number.
    """

    def __init__(self, most: int = MOST_PENDING) -> None:
        self._most, self.answers = most, 0

    @contextlib.contextmanager
    def admit(self, answers: int) -> Generator[None]:
        """Count a request's answers as pending, inside this context manager.

        Raises:
            RefusedRequest: They are too many, in the request or with other pending ones.
        """
        if self.answers + answers > self._most:
            fits = answers <= self._most
            raise RefusedRequest(
                f"the request asks for {plural(answers, 'answer')}, and a key may have "
                f"{self._most} under way, of which {self.answers} are; send "
                + ("it again later" if fits else "fewer prompts, or a smaller n"),
                status=429 if fits else 400,
                code="rate_limit_exceeded" if fits else None,
            )
        self.answers += answers
        try:
            yield
        finally:
            self.answers -= answers


def check_tokens(request: ChatRequest | TextRequest, lengths: Sequence[int], context: int) -> None:
    """Check the number of tokens.

    Args:
        request: the request.
        lengths: lengths of its prompts, in tokens.
        context: length that an answer may fill if the request has no `max_tokens`.

    Raises:
        RefusedRequest: Prompts and answers together may have too many.
    """
    draw = request.draw
    most = MOST_LOGPROBS if draw.logprobs else MOST_TOKENS
    shown = draw.n if draw.logprobs and isinstance(request, TextRequest) and request.echo else 1
    rooms = (context - each if draw.max_tokens is None else draw.max_tokens for each in lengths)
    total = shown * sum(lengths) + draw.n * sum(max(room, 0) for room in rooms)
    if total > most:
        what = " with logprobs" if draw.logprobs else ""
        raise RefusedRequest(
            f"{plural(len(lengths), 'prompt')} and {plural(request.answers, 'answer')} may come to "
            f"{total} tokens, and may{what} to {most} in a request; set a smaller max_tokens or n, "
            "or send fewer prompts",
            param="max_tokens",
        )
