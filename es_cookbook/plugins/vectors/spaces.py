"""Soft prompts and steering vectors: spaces of a few thousand numbers beside frozen weights.

A soft prompt (prompt tuning, Lester et al. 2021, arXiv:2104.08691) consists of the embeddings of
`num_tokens` virtual tokens, which come before every prompt. ES over them without a projection to
fewer dimensions is from Cai et al. 2026, arXiv:2603.13786; their regularisation by confidence is
left out. It starts from the embeddings of a text's tokens, repeated up to `num_tokens`, or of
tokens drawn from the vocabulary by a seed. So the centre starts as the base with that text before
each prompt. The base itself answers without virtual tokens. The context of prompts and answers is
`num_tokens` shorter.

A steering vector (activation addition, Turner et al. 2023, arXiv:2308.10248) is added to the
outputs of a layer, thus to the residual stream, at every position. All start at 0, as the base.

Vectors are perturbed by dense noise in the exact arithmetic of `full_rank`, so `sigma` is in units
of an embedding's, or of the residual stream's, elements. Noise larger than the elements replaces
the virtual tokens, which answers hardly notice: their loss stays below what `auto` looks for. So
`auto` takes at most the root mean square of the model's embedding.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

import chz
from typing_extensions import override

from es_cookbook.common.checks import check_range
from es_cookbook.common.errors import ConfigError
from es_cookbook.evolution.genome import MAX_SEED
from es_cookbook.evolution.noise import WORDS_PER_BLOCK, words
from es_cookbook.evolution.spaces.base import ParameterInfo, SearchSpaceBuilder, layer_of
from es_cookbook.evolution.spaces.factors import ReadAdapter
from es_cookbook.evolution.spaces.full_rank import FullRankSpace

if TYPE_CHECKING:
    import torch

_NUM_TOKENS = 16
"""Virtual tokens of a prompt that does not start from a text."""
_MOST_TOKENS = 2**16


@chz.chz
class SoftPrompt(SearchSpaceBuilder):
    """Embeddings of virtual tokens before each prompt."""

    has_vectors: ClassVar[bool] = True
    starts_elsewhere: ClassVar[bool] = True
    text: str | None = chz.field(
        default=None, doc="text whose tokens' embeddings it starts from; random tokens if unset"
    )
    num_tokens: int | None = chz.field(
        default=None, doc=f"virtual tokens; those of the text if unset, {_NUM_TOKENS} without one"
    )
    init_seed: int = chz.field(default=0, doc="seed of the random tokens")
    text_tokens: tuple[int, ...] = chz.field(
        default=(), doc="tokens of the text; the model's own tokenizer finds them if unset"
    )

    @chz.validate
    def _fields(self) -> None:
        check_range(self, "num_tokens", at_least=1, at_most=_MOST_TOKENS, prefix="search_space.")
        check_range(self, "init_seed", at_least=0, at_most=MAX_SEED, prefix="search_space.")
        if self.text == "":
            raise ConfigError("search_space.text must not be empty; leave it out for random tokens")
        if self.text is not None and self.init_seed:
            raise ConfigError(
                "search_space.init_seed draws random tokens: leave it out beside a text"
            )
        if self.num_tokens is not None and len(self.text_tokens) > self.num_tokens:
            raise ConfigError(
                f"search_space.num_tokens must be at least {len(self.text_tokens)}, the tokens of "
                f"the text, found {self.num_tokens}"
            )
        if self.include != ("*",) or self.exclude:
            raise ConfigError(
                "search_space=soft_prompt perturbs virtual tokens, not parameters of the model; "
                "leave out search_space.include and search_space.exclude"
            )

    @override
    def tokenized(self, tokenize: Callable[[str], list[int]]) -> "SoftPrompt":
        if self.text is None or self.text_tokens:
            return self
        if not (tokens := tokenize(self.text)):
            raise ConfigError(f"search_space.text has no tokens of the model: {self.text!r:.60}")
        return chz.replace(self, text_tokens=tuple(tokens))

    def __call__(
        self, parameters: Sequence[ParameterInfo], read_adapter: ReadAdapter | None = None
    ) -> "_VectorSpace":
        """Build the space over the model's first embedding."""
        embedding = _embedding(parameters)
        rows, width = embedding.shape
        number = self.num_tokens or len(self.text_tokens) or _NUM_TOKENS
        tokens = self.text_tokens
        if not tokens:
            drawn = words(self.init_seed, "soft_prompt", 0, -(-number // WORDS_PER_BLOCK))
            tokens = tuple((drawn % rows).tolist())
        if max(tokens) >= rows or min(tokens) < 0:
            raise ConfigError(f"search_space.text_tokens must be 0 to {rows - 1}, found {tokens}")
        module = embedding.name.removesuffix(".weight")
        shapes = {f"{module}.soft_prompt": (number, width)}
        return _VectorSpace(
            shapes,
            self.noise,
            self.shares(shapes, divided=True),
            vectors=dict.fromkeys(shapes, module),
            embedding=embedding.name,
            tokens=tuple(itertools.islice(itertools.cycle(tokens), number)),
            largest_sigma=embedding.rms or math.inf,
        )


@chz.chz
class Steering(SearchSpaceBuilder):
    """A vector for each layer that has a selected parameter, added to the layer's outputs."""

    has_vectors: ClassVar[bool] = True

    def __call__(
        self, parameters: Sequence[ParameterInfo], read_adapter: ReadAdapter | None = None
    ) -> "_VectorSpace":
        """Build the space over the layers of the parameters that include and exclude leave."""
        _, width = _embedding(parameters).shape
        layers = [layer_of(parameter.name) for parameter in self.select(parameters)]
        vectors = {f"{layer}.steering": layer for layer in layers if layer is not None}
        if not vectors:
            raise ConfigError(
                f"search_space selects no layer: include {list(self.include)} and exclude "
                f"{list(self.exclude)} leave no parameter of a layer"
            )
        shapes = dict.fromkeys(vectors, (width,))
        shares = self.shares(shapes, divided=True)
        return _VectorSpace(shapes, self.noise, shares, vectors=vectors)


def _embedding(parameters: Sequence[ParameterInfo]) -> ParameterInfo:
    """Return the embedding of tokens: the first one."""
    found = next((p for p in parameters if p.kind == "embedding"), None)
    if found is None:
        raise ConfigError("search_space: the model has no embedding of tokens")
    return found


@dataclasses.dataclass(frozen=True)
class _VectorSpace(FullRankSpace):
    """Vectors, which start as rows of an embedding or at 0, perturbed by dense noise.

    Attributes:
        embedding: name of the embedding, and `tokens`, the rows to start from; 0 if there are none.
    """

    embedding: str = ""
    tokens: tuple[int, ...] = ()

    @property
    @override
    def reads(self) -> Collection[str]:
        return {*self.shapes, self.embedding}

    @override
    def base(self, parameters: Mapping[str, "torch.Tensor"]) -> dict[str, "torch.Tensor"]:
        """Return the start; of the model's parameters only the embedding matters."""
        import torch

        if not self.tokens:
            return {name: torch.zeros(shape) for name, shape in self.shapes.items()}
        rows = parameters[self.embedding][list(self.tokens)].detach().float()
        return dict.fromkeys(self.shapes, rows)
