"""What an engine refuses: requests that it can never serve, and use at the wrong time."""

from collections.abc import Generator, Sequence
from contextlib import contextmanager

from es_cookbook.common.errors import EngineError, RequestError
from es_cookbook.common.terminal import plural
from es_cookbook.engines.base import LogprobsRequest, SampleRequest
from es_cookbook.evolution.genome import MAX_SEED


def check_sample(request: SampleRequest, context_length: int, vocabulary_size: int) -> int:
    """Check a request's prompt, stop strings and seed.

    Returns:
        Most tokens to sample: what is asked for, or what the context has room for.

    Raises:
        RequestError: No prompt, one that fills the context, an empty stop string, a token or seed
            out of range.
    """
    prompt_T = request.observation.tokens_T
    _check_tokens("a prompt", prompt_T, vocabulary_size)
    if len(prompt_T) >= context_length:
        raise RequestError(
            f"a prompt of {plural(len(prompt_T), 'token')} leaves no room in the engine's "
            f"context of {plural(context_length, 'token')}; shorten the prompt or raise "
            "engine.max_model_len"
        )
    if "" in request.observation.stop:
        raise RequestError("an empty stop string would end every action; leave it out")
    if not 0 <= request.seed <= MAX_SEED:
        raise RequestError(
            f"a sampling seed must be a 63-bit integer (0 to 2**63 - 1), found {request.seed}"
        )
    return min(request.params.max_tokens, context_length - len(prompt_T))


def check_logprobs(request: LogprobsRequest, context_length: int, vocabulary_size: int) -> None:
    """Check a request's prompt and continuation.

    Raises:
        RequestError: One of them is empty, both together exceed the context, a token out of range.
    """
    _check_tokens("a prompt", request.prompt_T, vocabulary_size)
    _check_tokens("a continuation", request.continuation_T, vocabulary_size)
    length = len(request.prompt_T) + len(request.continuation_T)
    if length > context_length:
        raise RequestError(
            f"a prompt and continuation of {plural(length, 'token')} exceed the engine's context "
            f"of {plural(context_length, 'token')}; shorten them or raise engine.max_model_len"
        )


def _check_tokens(what: str, tokens_T: Sequence[int], vocabulary_size: int) -> None:
    if not tokens_T:
        raise RequestError(f"{what} needs at least one token, found none")
    for token in (min(tokens_T), max(tokens_T)):
        if not 0 <= token < vocabulary_size:
            raise RequestError(
                f"{what} has token {token}, and the model's tokens are 0 to {vocabulary_size - 1}"
            )


class Usage:
    """Who may use an engine when: requests together, a change of its weights alone.

    For the tasks of one event loop.

    Attributes:
        closed: the engine can be used no more.
    """

    def __init__(self) -> None:
        self.closed = False
        self._num_in_flight = 0
        self._change: str | None = None

    @contextmanager
    def request(self) -> Generator[None]:
        """Inside, a request is in flight.

        Raises:
            EngineError: The engine is closed, or being changed.
        """
        self._check()
        self._num_in_flight += 1
        try:
            yield
        finally:
            self._num_in_flight -= 1

    @contextmanager
    def changing(self, what: str) -> Generator[None]:
        """Inside, nobody else may use the engine; `what` is done, for example "load genomes".

        Raises:
            EngineError: The engine is closed, being changed, or requests are in flight.
        """
        self._check()
        if self._num_in_flight:
            requests = plural(self._num_in_flight, "request")
            raise EngineError(f"cannot {what} with {requests} in flight")
        self._change = what
        try:
            yield
        finally:
            self._change = None

    def _check(self) -> None:
        if self.closed:
            raise EngineError("the engine is closed")
        if self._change is not None:
            raise EngineError(f"the engine cannot be used while another task has it {self._change}")
