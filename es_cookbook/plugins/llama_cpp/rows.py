"""Requests in the sequences of a context: their tokens, and what of them is in its cache.

A request takes a row, and begins with the longest prefix of its prompt that any row has in the
cache: tokens of a sequence may belong to others as well, so that costs nothing. A request waits
where another one is about to compute more of its prompt.
"""

import asyncio
import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from es_cookbook.engines.base import LogprobsRequest, SampleRequest
from es_cookbook.engines.torch.slots import token_uniforms
from es_cookbook.plugins.llama_cpp.child import PassToken

_WORTH_WAITING = 8
"""Tokens of a prefix for which a request waits until another has computed them."""


@dataclasses.dataclass(slots=True, eq=False)
class Work:
    """A request on its way through the engine.

    Attributes:
        limit: most tokens to sample; 0 for a logprobs request.
        future: gets the result.
        wants_tops: a logprobs request asks for the most probable tokens, too.
        found: log-probabilities of its tokens so far.
        sampled: tokens sampled so far.
    """

    request: SampleRequest | LogprobsRequest
    limit: int
    future: "asyncio.Future[Any]"
    wants_tops: bool = False
    found: list[Any] = dataclasses.field(default_factory=list[Any])
    sampled: list[int] = dataclasses.field(default_factory=list[int])
    uniforms: npt.NDArray[np.float64] = dataclasses.field(init=False)
    given: list[int] = dataclasses.field(init=False)
    num_prompt: int = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        if isinstance(self.request, LogprobsRequest):
            prompt_T, continuation_T = self.request.prompt_T, self.request.continuation_T
            self.uniforms = np.zeros(0)
        else:
            prompt_T, continuation_T = self.request.observation.tokens_T, ()
            drawn = self.request.params.temperature > 0
            num_drawn = self.limit if drawn else 0
            self.uniforms = token_uniforms(self.request.seed, num_drawn)
        self.num_prompt, self.given = len(prompt_T), [*prompt_T, *continuation_T]

    @property
    def length(self) -> int:
        """Most tokens in the cache."""
        return len(self.given) + self.limit


@dataclasses.dataclass(slots=True, eq=False)
class Row:
    """A sequence of the context.

    Attributes:
        tokens: tokens in the cache.
        work: request that it runs; None if it is free.
        waiting: tokens to be decoded next; empty before the row is begun.
        is_begun: the prefix of its prompt is in the cache.
    """

    number: int
    tokens: list[int] = dataclasses.field(default_factory=list[int])
    work: Work | None = None
    waiting: list[int] = dataclasses.field(default_factory=list[int])
    is_begun: bool = False

    def wants_output(self, place: int) -> bool:
        """Return whether the logits behind the token at this position are needed."""
        assert self.work is not None
        return place >= self.work.num_prompt - 1

    def end(self) -> None:
        self.work, self.waiting, self.is_begun = None, [], False


def begin(rows: Sequence[Row]) -> list[tuple[int, int, int]]:
    """Give rows that have not begun the longest prefix there is; returns (row, from, tokens)."""
    begun: list[tuple[int, int, int]] = []
    for row in rows:
        if row.work is None or row.is_begun:
            continue
        prompt, most = row.work.given, row.work.num_prompt - 1
        of = {other.number: common_prefix(other.tokens, prompt[:most]) for other in rows}
        best = max(of, key=lambda number: (of[number], number == row.number))
        coming = (
            common_prefix(other.work.given, prompt[:most])
            for other in rows
            if other.work is not None and other.is_begun and other.waiting
        )
        if max(coming, default=0) >= of[best] + _WORTH_WAITING:
            continue
        kept = of[best]
        begun.append((row.number, best, kept))
        last = len(prompt) - (1 if isinstance(row.work.request, LogprobsRequest) else 0)
        row.tokens, row.waiting, row.is_begun = prompt[:kept], prompt[kept:last], True
    return begun


def next_pass(
    rows: Sequence[Row], most_tokens: int, most_outputs: int
) -> tuple[list[PassToken], list[tuple[Row, int]]]:
    """Take tokens that wait, row after row, as many as fit.

    Returns:
        The tokens, and row and position of those whose logits are wanted, in order.
    """
    tokens: list[PassToken] = []
    outputs: list[tuple[Row, int]] = []
    for row in rows:
        while row.waiting and len(tokens) < most_tokens:
            place = len(row.tokens)
            wants = row.wants_output(place)
            if wants and len(outputs) == most_outputs:
                break
            if wants:
                outputs.append((row, place))
            row.tokens.append(row.waiting.pop(0))
            tokens.append((row.tokens[-1], place, row.number, wants))
    return tokens, outputs


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the number of first tokens that are the same.

    >>> common_prefix([1, 2, 3], [1, 2, 4])
    2
    """
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))
