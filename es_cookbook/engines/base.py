"""Engines: they hold the model, host genomes, sample and score tokens.

Weights are never sent. An engine is built from a model and a search space, gets genomes as seeds,
and is moved by steps; it returns the centre's fingerprint after every step, so that engines can be
compared.

Engines refuse requests that they can never serve (`check_sample`, `check_logprobs`), and calls at
the wrong time (`Usage`).
"""

import dataclasses
import functools
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Collection, Generator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import anyio
import chz
from typing_extensions import override

from es_cookbook.checkpoints.model_files import model_directory
from es_cookbook.common.checks import check_types
from es_cookbook.common.errors import ConfigError, EngineError, RequestError
from es_cookbook.common.machine.spans import NO_SPANS, Spans
from es_cookbook.common.registry import Registered
from es_cookbook.common.terminal import plural
from es_cookbook.evolution.genome import MAX_SEED, Genome, Step
from es_cookbook.rl.types import Action, Observation, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from es_cookbook.evolution.spaces.base import SearchSpace, SearchSpaceBuilder

ENGINE_NAMES = Registered("engines")
"""Names on the command line."""
_DEFAULT_CONTEXT = 4096

Target: TypeAlias = int | Literal["centre", "base"]
"""The target: an index into the loaded `genomes_G`, the centre, or the frozen base model."""


class Progress:
    """Receives the progress of one action while it is sampled, from engines that support it.

    Attributes:
        follows: whether `sampled` is called, in the event loop.
        cached_tokens: prompt tokens whose keys and values were cached; None if unknown.
    """

    follows: bool = False
    cached_tokens: int | None = None

    def sampled(self, tokens_T: Sequence[int]) -> None:
        """Take all tokens sampled so far; the last ones come only with the action."""


@dataclasses.dataclass(frozen=True, slots=True)
class SampleRequest:
    """One action to sample.

    Attributes:
        target: the target that answers.
        observation: prompt tokens and stop conditions.
        params: sampling parameters.
        seed: 63-bit sampling seed; the result is a function of it, not of what else is in the
            batch.
        progress: receives progress while it is sampled.
    """

    target: Target
    observation: Observation
    params: SamplingParams
    seed: int = 0
    progress: Progress | None = dataclasses.field(default=None, compare=False)

    @property
    def stop(self) -> tuple[str, ...]:
        """Texts that end the action: its observation's, and those of the sampling parameters."""
        return self.observation.stop + self.cut_at

    @property
    def cut_at(self) -> tuple[str, ...]:
        """Stop texts of the sampling parameters, which are not part of the action's text."""
        given = self.params.stop
        return self.observation.usual_stop if given is None else given


@dataclasses.dataclass(frozen=True, slots=True)
class LogprobsRequest:
    """A continuation to score.

    Attributes:
        target: the target that scores.
        prompt_T: at least one token.
        continuation_T: tokens whose log-probabilities are asked, at least one.
    """

    target: Target
    prompt_T: tuple[int, ...]
    continuation_T: tuple[int, ...]


class Top(NamedTuple):
    """A token of a continuation, and the most probable one in its place."""

    logprob: float
    best: int
    best_logprob: float


class Host(ABC):
    """Where a block of genomes is resident: an engine, or one engine of many.

    All methods are safe to call from many tasks of one event loop.
    """

    @property
    def label(self) -> str:
        """The engine's name in a profile."""
        return "engine"

    @abstractmethod
    async def load(self, genomes_G: Sequence[Genome]) -> None:
        """Make these genomes resident in place of any before; requests name them by index.

        Args:
            genomes_G: at most `traits.capacity` of the engine.
        """

    @abstractmethod
    async def sample(self, request: SampleRequest) -> Action:
        """Sample one action; requests in flight are batched by the engine.

        Every engine draws from the softmax of logits / temperature over the tokenizer's tokens
        (`checkpoints.models.Vocabulary`), with top-p from its smallest set of most probable tokens;
        greedily at temperature 0, for any seed and top-p. The log-probabilities of an action are
        those of `logprobs`: before temperature and top-p.
        Targets with one seed have common random numbers: the same tokens, as long as their
        distributions are the same. Engines of different kinds draw differently from one seed.

        Raises:
            RequestError: A request that can never be served, for example a prompt longer
                than the context.
        """

    @abstractmethod
    async def logprobs(self, request: LogprobsRequest) -> list[float]:
        """Return the log-probability (natural log) of each continuation token."""

    async def tops(self, request: LogprobsRequest) -> list[Top]:
        """Return log-probabilities as `logprobs`, with the most probable token in each place.

        Raises:
            RequestError: By default.
        """
        raise RequestError(
            "this engine cannot return the most probable tokens; accepted: torch or vllm"
        )


@dataclasses.dataclass(frozen=True, slots=True)
class EngineTraits:
    """Properties of an engine that are constant for its life.

    Attributes:
        capacity: number of genomes that can be resident at once; in a pool, on each engine.
        context_length: most tokens of prompt and action together.
        base_dtype: dtype of the base weights, from which the centre starts, e.g. "bfloat16".
        max_terms: most terms of a genome; None if there is no limit.
        products: dtype of matrix products, where the engine has a choice; else None.
    """

    capacity: int
    context_length: int
    base_dtype: str
    max_terms: int | None = None
    products: str | None = None


class Engine(Host):
    """Holds the model and hosts genomes.

    Attributes:
        traits: constants of the engine; set when it is built.
        tokenizer: the model's own.
        space: parameters that genomes perturb.
        spans: records what the engine does besides answering; callers may set another.
    """

    traits: EngineTraits
    tokenizer: "PreTrainedTokenizerBase"
    space: "SearchSpace"
    spans: Spans = NO_SPANS

    @property
    def num_engines(self) -> int:
        """Number of blocks of genomes that can be resident together; a pool's number changes."""
        return 1

    @asynccontextmanager
    async def lend(self, centre: int | None = None) -> AsyncGenerator[Host]:
        """Borrow a host for a block of genomes, when one is free, for exclusive use.

        A single engine is its own host, for one block after the other.

        Args:
            centre: number of steps that the host has taken of those given to the engine, from the
                base on; None: all.

        Raises:
            EngineError: There is no engine left.
        """
        del centre  # A single engine moves between blocks only, so it is at that step already.
        async with self._turn:
            yield self

    @asynccontextmanager
    async def free(self) -> AsyncGenerator[None]:
        """Wait until the engine, or at least one of a pool, runs no block and can take a step."""
        async with self._turn:
            yield

    @functools.cached_property
    def _turn(self) -> anyio.Semaphore:
        return anyio.Semaphore(1)  # Unlike a lock, it may be released by another task.

    @abstractmethod
    async def apply(self, step: Step) -> int:
        """Move the centre. Returns its fingerprint; no genome is resident afterwards.

        Engines of a pool that run a block take the step before their next one.
        """

    @abstractmethod
    async def restore(self, steps: Iterable[Step], snapshot: Path | None = None) -> int:
        """Set the centre to the base model moved by these steps. Returns its fingerprint.

        Args:
            steps: all steps, from the base on.
            snapshot: an earlier centre to start from, if the engine can read it; the result is
                the same, bit for bit.
        """

    @abstractmethod
    async def save(self, path: Path) -> None:
        """Write the centre as a Hugging Face model directory, whole or not at all."""

    async def rest(self) -> None:
        """Release memory until `restore` is called; no requests are answered in between.

        By default nothing is released.
        """

    @abstractmethod
    def stats(self) -> Mapping[str, float]:
        """Return counters since the engine was built, for example `tokens` and `requests`."""

    @abstractmethod
    async def close(self) -> None:
        """Release threads, processes and memory; requests in flight fail.

        May be called twice.
        """


class QueuedEngine(Engine):
    """An engine in this process, whose requests are checked and wait in a queue.

    A subclass sets the limits of `check_sample`, and the tokens of `check_logprobs` that are never
    sampled.
    """

    _limits: tuple[int, int]
    _never: Collection[int]

    @override
    async def sample(self, request: SampleRequest) -> Action:
        return await self._submit(request, check_sample(request, *self._limits))

    @override
    async def logprobs(self, request: LogprobsRequest) -> list[float]:
        check_logprobs(request, *self._limits, self._never)
        return await self._submit(request, 0)

    @override
    async def tops(self, request: LogprobsRequest) -> list[Top]:
        check_logprobs(request, *self._limits, self._never)
        found = await self._submit(request, 0, wants_tops=True)
        return [Top(own, int(best), most) for own, best, most in found]

    @abstractmethod
    async def _submit(
        self, request: SampleRequest | LogprobsRequest, limit: int, wants_tops: bool = False
    ) -> Any:  # noqa: ANN401 - an action, or floats, or three numbers per token
        """Return the result of a request, of which at most `limit` tokens are sampled."""


class Requests(NamedTuple):
    """The requests of a generation: for each genome, and tokens of each."""

    genomes: int
    per_genome: int
    prompt_tokens: int
    sampled_tokens: int


@chz.chz
class EngineBuilder(ABC):
    """Builds an engine for a model and a search space."""

    _types = chz.validate(check_types)

    @property
    def name(self) -> str:
        """The name to type on the command line, or the class's name."""
        own = f"{type(self).__module__}:{type(self).__qualname__}"
        names = (name for name, target in ENGINE_NAMES.items() if target == own)
        return next(names, type(self).__name__)

    @property
    def least_temperature(self) -> float:
        """The lowest temperature above 0 that the engine samples at."""
        return 0.0

    def check(self, model_name: str) -> None:
        """Check that the model exists before torch is imported; fetch it from the Hub.

        Raises:
            ModelError: It does not exist.
        """
        model_directory(model_name)

    def check_space(self, search_space: "SearchSpaceBuilder", max_terms: int = 1) -> None:  # noqa: B027 - most host all
        """Refuse search spaces, and genomes of so many terms, that it never hosts.

        Raises:
            ConfigError: Says which it hosts.
        """

    def tokenizer(self, model_name: str) -> "PreTrainedTokenizerBase":
        """Return the tokenizer that the engine will have, without loading the model.

        Raises:
            ModelError: It is missing or cannot be read.
        """
        from es_cookbook.checkpoints.models import load_tokenizer  # Which imports torch.

        return load_tokenizer(model_name)

    async def needs(
        self, model_name: str, search_space: "SearchSpaceBuilder", requests: Requests
    ) -> Sequence[tuple[str, int | str]]:
        """Measure what a generation needs: labels with bytes, or with text.

        Raises:
            ConfigError: By default.
        """
        del model_name, search_space, requests
        raise ConfigError(f"engine={self.name} cannot be measured before a run")

    @abstractmethod
    async def __call__(self, *, model_name: str, search_space: "SearchSpaceBuilder") -> Engine:
        """Load the model and start the engine.

        Args:
            model_name: a Hugging Face model directory or Hub name.
            search_space: the parameters that genomes perturb, and how noise maps to them.

        Raises:
            ModelError: The model cannot be loaded or the search space does not fit it.
        """


@chz.chz
class ModelEngineBuilder(EngineBuilder):
    """Builds an engine that holds the model itself."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = chz.field(
        default="auto",
        doc="dtype of sampling weights; auto: the checkpoint's. The centre is always float32",
    )
    max_model_len: int | None = chz.field(
        default=None,
        doc="most tokens of prompt and action; the model's own context if unset, up to "
        f"{_DEFAULT_CONTEXT}",
    )

    def context_length(self, model: "PreTrainedModel") -> int:
        """Return the most tokens that prompt and action may have together with this model."""
        text = model.config.get_text_config()
        own_length = int(getattr(text, "max_position_embeddings", None) or _DEFAULT_CONTEXT)
        if own_length < 0:  # XLNet's value for no limit
            own_length = _DEFAULT_CONTEXT
        return min(own_length, self.max_model_len or _DEFAULT_CONTEXT)


def check_sample(request: SampleRequest, context_length: int, vocabulary_size: int) -> int:
    """Check a request's prompt, stop strings and seed.

    Returns:
        Most tokens to sample: as requested, or as fit into the context.

    Raises:
        RequestError: No prompt, one that fills the context, an empty stop string, no such token,
            a seed out of range.
    """
    prompt_T = request.observation.tokens_T
    _check_tokens("a prompt", prompt_T, vocabulary_size)
    if len(prompt_T) >= context_length:
        raise RequestError(
            f"a prompt of {plural(len(prompt_T), 'token')} leaves no room in the engine's "
            f"context of {plural(context_length, 'token')}; shorten the prompt or raise "
            "engine.max_model_len"
        )
    if "" in request.stop:
        raise RequestError("an empty stop string would end every action; leave it out")
    if not 0 <= request.seed <= MAX_SEED:
        raise RequestError(
            f"a sampling seed must be a 63-bit integer (0 to 2**63 - 1), found {request.seed}"
        )
    return min(request.params.max_tokens, context_length - len(prompt_T))


def check_logprobs(
    request: LogprobsRequest, context_length: int, vocabulary_size: int, never: Collection[int] = ()
) -> None:
    """Check a request's prompt and continuation, which must not contain unused tokens.

    Raises:
        RequestError: One of them is empty, both together exceed the context, no such token.
    """
    _check_tokens("a prompt", request.prompt_T, vocabulary_size)
    _check_tokens("a continuation", request.continuation_T, vocabulary_size)
    if never and (found := set(request.continuation_T).intersection(never)):
        raise RequestError(
            f"a continuation has token {min(found)}, for which the model has a row and its "
            "tokenizer no text, so that it is never sampled"
        )
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
    """Reader–writer guard: requests share the engine; weight updates need exclusive access.

    For the tasks of one event loop.

    Attributes:
        closed: the engine can be used no more.
        rests: it can be used once its centre is restored.
    """

    def __init__(self) -> None:
        self.closed = self.rests = False
        self._num_in_flight = 0
        self._change: str | None = None

    @contextmanager
    def request(self) -> Generator[None]:
        """Count a request as in flight inside the block.

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
        """Hold exclusive access inside the block, which does `what`, for example "load genomes".

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
        if self.rests:
            raise EngineError("the engine rests: it can be used once its centre is restored")
        if self._change is not None:
            raise EngineError(f"the engine cannot be used while another task has it {self._change}")
