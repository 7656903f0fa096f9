"""What an engine is: it holds the model, hosts genomes, samples and scores tokens.

Weights never travel. An engine is built from (model, search space), given genomes as seeds, and
moved by steps; it answers every step with the centre's fingerprint, so that engines which should
agree can prove that they do.
"""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

import chz

from es_cookbook.evolution.genome import Genome, Step
from es_cookbook.rl.types import Action, Observation, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from es_cookbook.evolution.spaces.base import SearchSpaceBuilder

ENGINE_NAMES = {"torch": "es_cookbook.engines.torch_engine:TorchEngineBuilder"}
"""What a user types on the command line."""

Target: TypeAlias = int | Literal["centre", "base"]
"""Who answers: an index into the loaded `genomes_G`, the centre, or the frozen base model."""


@dataclasses.dataclass(frozen=True, slots=True)
class SampleRequest:
    """One action to sample.

    Attributes:
        target: who answers.
        observation: prompt tokens and stop conditions.
        params: sampling parameters.
        seed: 63-bit sampling seed; the result is a function of it, not of what else is in the
            batch.
    """

    target: Target
    observation: Observation
    params: SamplingParams
    seed: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class LogprobsRequest:
    """A continuation to score.

    Attributes:
        target: who scores.
        prompt_T: at least one token.
        continuation_T: tokens whose log-probabilities are asked, at least one.
    """

    target: Target
    prompt_T: tuple[int, ...]
    continuation_T: tuple[int, ...]


class Engine(ABC):
    """Holds the model and hosts genomes.

    All methods are safe to call from many tasks of one event loop.
    """

    @property
    @abstractmethod
    def capacity(self) -> int:
        """How many genomes can be resident at once."""

    @property
    @abstractmethod
    def tokenizer(self) -> "PreTrainedTokenizerBase":
        """The model's own tokenizer."""

    @property
    @abstractmethod
    def context_length(self) -> int:
        """Most tokens of prompt and action together."""

    @abstractmethod
    async def load(self, genomes_G: Sequence[Genome]) -> None:
        """Make these genomes resident in place of any before; requests name them by index.

        Args:
            genomes_G: at most `capacity`.
        """

    @abstractmethod
    async def sample(self, request: SampleRequest) -> Action:
        """Sample one action; requests in flight are batched by the engine.

        Raises:
            RequestError: A request that can never be served, for example a prompt longer
                than the context.
        """

    @abstractmethod
    async def logprobs(self, request: LogprobsRequest) -> list[float]:
        """Log-probability (natural log) of each continuation token."""

    @abstractmethod
    async def apply(self, step: Step) -> int:
        """Move the centre; gives its fingerprint. No genome is resident afterwards."""

    @abstractmethod
    async def restore(self, steps: Iterable[Step]) -> int:
        """Set the centre to the base model moved by these steps; gives its fingerprint."""

    @abstractmethod
    async def save(self, path: Path) -> None:
        """Write the centre as a Hugging Face model directory, whole or not at all."""

    @abstractmethod
    def stats(self) -> Mapping[str, float]:
        """Counters since the engine was built, for example `tokens` and `requests`."""

    @abstractmethod
    async def close(self) -> None:
        """Release threads, processes and memory; requests in flight fail.

        Closing twice is harmless.
        """


@chz.chz
class EngineBuilder(ABC):
    """Builds an engine for a model and a search space."""

    @abstractmethod
    async def __call__(self, *, model_name: str, search_space: "SearchSpaceBuilder") -> Engine:
        """Load the model and start the engine.

        Args:
            model_name: a Hugging Face model directory or Hub name.
            search_space: which parameters genomes perturb, and how noise maps to them.

        Raises:
            ModelError: The model cannot be loaded or the search space does not fit it.
        """
