"""What an engine refuses before it starts: requests that can never be served."""

from collections.abc import Sequence

from es_cookbook.common.errors import RequestError
from es_cookbook.engines.base import LogprobsRequest, SampleRequest
from es_cookbook.evolution.genome import MAX_SEED


def check_sample(request: SampleRequest, context_length: int, vocabulary_size: int) -> None:
    """Check a request's prompt, stop strings and seed.

    Raises:
        RequestError: No prompt, one that fills the context, an empty stop string, a token or seed
            out of range.
    """
    prompt_T = request.observation.tokens_T
    _check_tokens("a prompt", prompt_T, vocabulary_size)
    if len(prompt_T) >= context_length:
        raise RequestError(
            f"a prompt of {len(prompt_T)} tokens leaves no room in the engine's context of "
            f"{context_length} tokens; shorten the prompt or raise engine.max_model_len"
        )
    if "" in request.observation.stop:
        raise RequestError("an empty stop string would end every action; leave it out")
    if not 0 <= request.seed <= MAX_SEED:
        raise RequestError(
            f"a sampling seed must be a 63-bit integer (0 to 2**63 - 1), found {request.seed}"
        )


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
            f"a prompt and continuation of {length} tokens exceed the engine's context of "
            f"{context_length} tokens; shorten them or raise engine.max_model_len"
        )


def _check_tokens(what: str, tokens_T: Sequence[int], vocabulary_size: int) -> None:
    if not tokens_T:
        raise RequestError(f"{what} needs at least one token, found none")
    for token in (min(tokens_T), max(tokens_T)):
        if not 0 <= token < vocabulary_size:
            raise RequestError(
                f"{what} has token {token}, and the model's tokens are 0 to {vocabulary_size - 1}"
            )
