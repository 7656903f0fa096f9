"""Search spaces: which parameters a genome perturbs, and how noise maps to them.

A builder is what a user configures; it selects some of a model's parameters by name and returns a
space. A space turns a term (seed, coefficient) into a change of one parameter, with exact
arithmetic: float32, every product and every sum rounded on its own, in a fixed order. Fused
multiply-add and reassociation are what make two machines disagree in the last bit, so neither is
used, and NumPy, torch and CUDA agree to the bit.

To add one: subclass `SearchSpaceBuilder` and `SearchSpace` in a separate module, and add a name
to `SEARCH_SPACE_NAMES`. σ by layer and partitions come with `SearchSpaceBuilder.shares`: the space
keeps it, and adds to each parameter `shares.own(name, terms)` in place of the terms. Engines and
exports know no space by its class: all that they need is in the attributes of
`SearchSpace`.

A term (seed, coefficient) means coefficient · E everywhere; with `Shares`, parameter p has

    coefficient_p = coefficient * factor_p * √K  if p is in the seed's part, else none

a product in float64, which the space rounds to float32 once, as it rounds a coefficient. It is a
function of (seed, name) alone: twins share their part, so a twin is still the exact mirror, and a
step of recorded terms means the same wherever and whenever it is taken.

- Factors are σ by layer. A step is made of the same noise as genomes, so it moves p by factor_p
  too; since fitness answers to p's noise in proportion to factor_p, p's learning rate changes with
  factor_p². It is ES with the diagonal covariance σ² · diag(factor²).
- K partitions are drawn anew in every generation (CoPES, arXiv:2608.02391): the parameters are
  divided at random into K groups of about equal size, a seed changes one of them,
  and √K keeps the expected norm of its noise. The seeds of a generation are `partition_seed`s of
  the same partition, N/K for each group, and each group has the step of those.
"""

import dataclasses
import difflib
import fnmatch
import functools
import itertools
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, TypeAlias

import chz
import numpy as np
from numpy.typing import NDArray

from es_cookbook.common.checks import check_range, check_types
from es_cookbook.common.errors import ConfigError, ModelError
from es_cookbook.common.registry import Registered
from es_cookbook.common.terminal import plural
from es_cookbook.evolution.genome import Term
from es_cookbook.evolution.noise import (
    LANE_VALUES,
    RUN,
    UNDIVIDED,
    WORDS_PER_BLOCK,
    NoiseKind,
    Part,
    Partitions,
    noise_of_seeds,
    partition_of,
    words,
)
from es_cookbook.evolution.spaces.factors import AdapterFactors, ReadAdapter

if TYPE_CHECKING:
    import torch  # Named in signatures only: configs are read and shown without importing torch.

SEARCH_SPACE_NAMES = Registered("search_spaces")
"""Names on the command line."""

WHOLE_KINDS = ("linear", "embedding", "other")
"""Kinds of the model's own parameters, by what their layer does with them."""

NO_WEIGHTS = (
    "this run's search space has vectors beside the model's weights: es-cookbook export writes a "
    "soft prompt without merge=, rank= and form=, and steering vectors without rank="
)

_LAYER = re.compile(r"(?:.*?\.)?\d+(?=\.)")

PIECE = 2**15
"""Elements of a weight that are worked on at once: they and their temporaries stay in the cache."""

AddTerms: TypeAlias = "Callable[[str, torch.Tensor, Part | None], None]"
"""Adds some terms to a weight, given its name and which part of the parameter it is."""


@dataclasses.dataclass(frozen=True, slots=True)
class ParameterInfo:
    """One parameter of a model.

    Attributes:
        name: its Hugging Face name, the first one of parameters that are tied.
        shape: its shape, (out, in) for a linear weight unless it is transposed.
        kind: one of `WHOLE_KINDS`, or its part of a quantised linear weight ("scales").
        bits: bits of the codes of a quantised weight and of its parts; None for all others.
        transposed: whether a linear weight is stored (in, out), as GPT-2's are.
        rms: root mean square of an embedding's elements; None if unknown, and for all others.
    """

    name: str
    shape: tuple[int, ...]
    kind: str
    bits: int | None = None
    transposed: bool = False
    rms: float | None = None

    @property
    def out_in(self) -> tuple[int, int]:
        """Outputs and inputs of a linear weight, whichever way it is stored."""
        rows, columns = self.shape
        return (columns, rows) if self.transposed else (rows, columns)


@dataclasses.dataclass(frozen=True)
class Shares:
    """Distribution of terms over a space's parameters; by default all have all terms.

    Attributes:
        factors: name -> factor on the coefficient; 1 for names that are not in it.
        num_partitions: groups of a generation's random partition; a term changes one of them.
        units: name -> place in `sizes` of what is in the same group of every partition; names that
            are not in it are divided themselves (`Partitions`).
        sizes: elements of each unit.
    """

    factors: Mapping[str, float] = dataclasses.field(default_factory=dict[str, float])
    num_partitions: int = 1
    units: Mapping[str, int] = dataclasses.field(default_factory=dict[str, int])
    sizes: tuple[int, ...] = ()

    def kinds(
        self, names: Sequence[str], terms: Sequence[Term]
    ) -> tuple[list[str], dict[str, int]]:
        """Sort parameters into kinds, by their shares of these terms.

        Returns:
            One parameter of each kind, and the place in that list of each parameter's own kind.
        """
        groups_U = [self._groups(p) for p in sorted(_partitions_of(terms))] if self.units else []
        numbers: dict[tuple[float | int, ...], int] = {}

        def number(name: str) -> int:
            of_partitions = (groups[self.units[name]] for groups in groups_U if name in self.units)
            key = self.factors.get(name, 1.0), *of_partitions
            return numbers.setdefault(key, len(numbers))

        kinds = {name: number(name) for name in names}
        return list({kind: name for name, kind in kinds.items()}.values()), kinds

    def own(self, name: str, terms: Sequence[Term]) -> Sequence[Term]:
        """Return the terms that change a parameter, in order, with their coefficients there."""
        factor = self.factors.get(name, 1.0)
        if factor == self.num_partitions == 1:
            return terms  # Of a long history they are many.
        own = terms
        if (unit := self.units.get(name)) is not None:
            group_of = {p: self._groups(p)[unit] for p in _partitions_of(terms)}
            part = Partitions(self.num_partitions)
            own = [t for t in terms if group_of[partition_of(t.seed)] == part.group(t.seed)]
        root = math.sqrt(self.num_partitions)
        return [Term(term.seed, term.coefficient * factor * root) for term in own]

    def partitions_of(self, name: str) -> Partitions:
        """Return the division of a parameter; undivided if it is in one group as a whole."""
        return UNDIVIDED if name in self.units else Partitions(self.num_partitions)

    def _groups(self, partition: int) -> Sequence[int]:
        return _groups_of_units(partition, self.sizes, self.num_partitions)


def _partitions_of(terms: Iterable[Term]) -> set[int]:
    return {partition_of(term.seed) for term in terms}


@functools.lru_cache(maxsize=1024)
def _groups_of_units(partition: int, sizes: tuple[int, ...], number: int) -> list[int]:
    """Return each unit's group: `balanced_blocks` of the units in a partition's random order.

    It is the order of the words of (partition, "partition"), one per unit.
    """
    drawn = words(partition, "partition", 0, -(-len(sizes) // WORDS_PER_BLOCK))[: len(sizes)]
    order = np.argsort(drawn, kind="stable").tolist()
    groups = [0] * len(sizes)
    blocks = balanced_blocks([sizes[unit] for unit in order], number)
    for unit, block in zip(order, blocks, strict=True):
        groups[unit] = block
    return groups


def balanced_blocks(sizes: Sequence[int], num_blocks: int) -> list[int]:
    """Cut neighbours of these sizes into 1 ... len(sizes) blocks of about the same size.

    Block b ends where the sizes so far come nearest to (b + 1) / num_blocks of all, and has one at
    least. Returns the block of each, rising from 0 to num_blocks - 1.

    >>> balanced_blocks([5, 1, 1, 1, 1, 1], 2)
    [0, 1, 1, 1, 1, 1]
    """
    so_far = list(itertools.accumulate(sizes))
    blocks: list[int] = []
    for b in range(num_blocks - 1):
        # Enough are left over for the later blocks; all numbers are whole, so nothing is rounded.
        ends = range(len(blocks) + 1, len(sizes) - (num_blocks - 2 - b))
        goal = (b + 1) * so_far[-1]
        end = min(ends, key=lambda end: abs(num_blocks * so_far[end - 1] - goal))
        blocks += [b] * (end - len(blocks))
    return blocks + [num_blocks - 1] * (len(sizes) - len(blocks))


@dataclasses.dataclass(frozen=True)
class SearchSpace(ABC):
    """The selected parameters of one model, and what a term does to each. Frozen and picklable.

    Attributes:
        shapes: name -> shape of the selected parameters, in the model's order.
        noise: distribution of the noise.
        shares: the share of a term that each of them has.
        rank: rank of terms that are factors beside the centre's weights; None if they are not.
        adapter: how the parameters make an adapter beside the base's weights; None if they do not.
        highest_code: greatest value of parameters that are whole numbers; None if they are real.
        vectors: modules of the model that the parameters are vectors for, by name, beside its
            weights: (hidden,) is added to the module's outputs, and (tokens, hidden) are the
            embeddings of virtual tokens before each prompt; None if parameters are something else.
        largest_sigma: upper bound on the sigma that is found for `optimizer.sigma=auto`.
    """

    makes_own_factors: ClassVar[bool] = False
    """Whether `term_factors` differs from the factors that the Triton programs make."""

    shapes: Mapping[str, tuple[int, ...]]
    noise: NoiseKind = "gaussian"
    shares: Shares = dataclasses.field(default_factory=Shares)
    rank: int | None = dataclasses.field(default=None, kw_only=True)
    adapter: AdapterFactors | None = dataclasses.field(default=None, kw_only=True)
    highest_code: int | None = dataclasses.field(default=None, kw_only=True)
    vectors: Mapping[str, str] | None = dataclasses.field(default=None, kw_only=True)
    largest_sigma: float = dataclasses.field(default=math.inf, kw_only=True)

    @property
    def is_dense(self) -> bool:
        """Whether each genome has its own weights, in place of a part beside the centre's."""
        return self.rank is None and self.adapter is None and self.vectors is None

    @property
    def weights(self) -> Collection[str]:
        """Names of the model's weights that genomes change, by themselves or by an adapter."""
        if self.vectors is not None:
            return ()
        return self.shapes.keys() if self.adapter is None else self.adapter.targets.keys()

    @property
    def reads(self) -> Collection[str]:
        """Names of the model's parameters that `base` may read, and `shapes`."""
        return self.shapes.keys()

    @property
    def num_virtual(self) -> int:
        """Virtual tokens before each prompt, except for the base."""
        return sum(shape[0] for shape in self.shapes.values() if self.vectors and len(shape) == 2)

    def base(self, parameters: Mapping[str, "torch.Tensor"]) -> Mapping[str, "torch.Tensor"]:
        """Return the start of the centre, with at least `shapes`: the model's own parameters.

        A space with its own parameters returns their start instead.
        """
        return parameters

    def merge_(
        self, parameters: Mapping[str, "torch.Tensor"], centre: Mapping[str, "torch.Tensor"]
    ) -> None:
        """Write a centre into the model's weights, in place, each rounded to its dtype once.

        An adapter's product is made on the CPU, where it has the same bits for all engines.

        Raises:
            ModelError: The space's parameters are vectors beside the weights.
        """
        if self.vectors is not None:
            raise ModelError(NO_WEIGHTS)
        if self.adapter is None:
            for name in self.shapes:
                parameters[name].data.copy_(centre[name])
            return
        for name in self.adapter.targets:
            weight = parameters[name].data
            ((a, b),) = self.adapter.factors(name, [lambda own: centre[own].cpu()])
            weight.copy_(self.adapter.merged(name, weight, a, b))

    @abstractmethod
    def add_terms_(
        self, name: str, weight: "torch.Tensor", terms: Sequence[Term], part: Part | None = None
    ) -> None:
        """Add Σ coefficient · E(seed) to the weight, in place, term after term.

        Terms whose coefficient rounds to 0 in float32 are skipped: they leave every bit (-0.0 too).

        Args:
            name: one of `shapes`.
            weight: contiguous float32 on the CPU, of that shape, or a part of it.
            terms: added in this order; many at once are cheaper than one by one.
            part: the weight's part of the parameter; all of it if None.
        """

    def device_adder(self, terms: Sequence[Term], device: "torch.device") -> AddTerms:
        """Return a function that adds these terms to weights on a GPU, as `add_terms_` does.

        Spaces whose noise those programs make send the terms there now, once for all weights with
        the same share of them. All others make it on the CPU and send that, with the same bits.
        """

        def add(name: str, weight: "torch.Tensor", part: Part | None) -> None:
            there = weight.cpu().contiguous()
            self.add_terms_(name, there, terms, part)
            weight.copy_(there)

        return add

    def term_factors(
        self, name: str, seeds_S: Sequence[int]
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Return A (seeds, rows, rank) and B (seeds, columns, rank); for spaces with a rank.

        A term's change of the weight is coefficient · A Bᵀ / √rank, with A = ε(seed, name + ".A")
        and B = ε(seed, name + ".B").
        """
        assert self.rank is not None
        rows, columns = self.shapes[name]
        a_S = noise_of_seeds(seeds_S, f"{name}.A", (rows, self.rank), self.noise)
        return a_S, noise_of_seeds(seeds_S, f"{name}.B", (columns, self.rank), self.noise)


@chz.chz
class SearchSpaceBuilder(ABC):
    """Selects parameters by name and says how they are perturbed."""

    _types = chz.validate(check_types)

    hosts_offsets: ClassVar[bool] = True
    """Whether engines can give a genome its own coordinates, `Genome.offsets`.

    Not where all genomes share the centre's weights, nor where parameters are whole numbers.
    """
    has_vectors: ClassVar[bool] = False
    """Whether the space that it builds does (`SearchSpace.vectors`)."""
    has_adapter: ClassVar[bool] = False
    """The same (`SearchSpace.adapter`)."""
    starts_elsewhere: ClassVar[bool] = False
    """Whether it starts neither at the base nor at adapters."""
    start_option: ClassVar[str] = ""
    """Its option with the directories of PEFT adapters that it starts from."""

    include: tuple[str, ...] = chz.field(
        default=("*",),
        doc="shell patterns over parameter names; what matches any of them is perturbed",
    )
    exclude: tuple[str, ...] = chz.field(
        default=(), doc="shell patterns over parameter names that are left as they are"
    )
    noise: NoiseKind = chz.field(
        default="gaussian", doc="distribution of the noise: gaussian, or rademacher for -1 and +1"
    )
    sigma_patterns: tuple[str, ...] = chz.field(
        default=(),
        doc="shell patterns over names of perturbed parameters whose sigma is scaled by "
        "sigma_factors; the first that matches counts",
    )
    sigma_factors: tuple[float, ...] = chz.field(
        default=(), doc="factors for sigma_patterns: 0.1,2; parameters that none matches have 1"
    )
    partitions: int = chz.field(
        default=1,
        doc="a seed perturbs one of so many parts of the parameters, drawn at random in every "
        "generation (CoPES), by sigma times the root of their number",
    )

    @chz.validate
    def _shares(self) -> None:
        if len(self.sigma_patterns) != len(self.sigma_factors):
            raise ConfigError(
                "search_space.sigma_patterns needs one of sigma_factors for each, found "
                f"{plural(len(self.sigma_patterns), 'pattern')} and "
                f"{plural(len(self.sigma_factors), 'factor')}"
            )
        for factor in self.sigma_factors:
            if not (math.isfinite(factor) and factor > 0):
                raise ConfigError(
                    f"search_space.sigma_factors must be above 0 and finite, found {factor}; to "
                    "leave parameters as they are, name them in search_space.exclude"
                )
        check_range(self, "partitions", at_least=1, prefix="search_space.")

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of parameters that it selects from."""
        return WHOLE_KINDS

    @property
    def moves_quantised(self) -> bool:
        """Whether it perturbs what quantised weights are made of, and not the weights."""
        return self.kinds != WHOLE_KINDS

    def tokenized(self, tokenize: "Callable[[str], list[int]]") -> "SearchSpaceBuilder":
        """Return the same, with the tokens of texts that it starts from."""
        return self

    @abstractmethod
    def __call__(
        self, parameters: Sequence[ParameterInfo], read_adapter: ReadAdapter | None = None
    ) -> SearchSpace:
        """Build the space.

        Args:
            parameters: all parameters of the model, in its order, tied ones once.
            read_adapter: opens the adapter that the space starts from, where it starts from one.

        Raises:
            ConfigError: A pattern that matches no parameter, or nothing left to perturb.
            ModelError: The adapter cannot be read, or does not fit.
        """

    @property
    def starts(self) -> Sequence[str]:
        """Directories of the PEFT adapters that it starts from."""
        given = getattr(self, self.start_option, None) or ()
        return [given] if isinstance(given, str) else given

    @property
    def starts_at_base(self) -> bool:
        """Whether the centre answers as the base before its first step."""
        return not (self.starts or self.starts_elsewhere)

    def check(self) -> None:
        """Raise a ConfigError before a model is loaded if there are no adapters to start from."""
        for path in self.starts:
            if not (Path(path) / "adapter_config.json").is_file():
                raise ConfigError(
                    f"search_space.{self.start_option}: {path!r} holds no PEFT adapter "
                    "(adapter_config.json); es-cookbook export writes that of a run with "
                    "search_space=adapter, and es-cookbook sft others"
                )

    def select(self, parameters: Sequence[ParameterInfo]) -> list[ParameterInfo]:
        """Return parameters in `include` and not in `exclude`, in the model's order.

        Raises:
            ConfigError: A pattern matches nothing, or nothing is left.
        """
        parameters = [parameter for parameter in parameters if parameter.kind in self.kinds]
        names = [parameter.name for parameter in parameters]
        included = _matched("include", self.include, names)
        excluded = _matched("exclude", self.exclude, names)
        selected = [p for p in parameters if p.name in included and p.name not in excluded]
        if not selected:
            raise ConfigError(
                f"search_space selects no parameter: include {list(self.include)} and exclude "
                f"{list(self.exclude)} leave none of the model's {len(names)}"
            )
        return selected

    def shares(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        together: Sequence[Sequence[str]] | None = None,
        *,
        divided: bool = False,
    ) -> Shares:
        """Return each parameter's share of a term; for subclasses.

        Args:
            shapes: shapes of the space's parameters, in order.
            together: names of those that are in one part; each alone if None.
            divided: partitions divide parameters themselves, run by run.

        Raises:
            ConfigError: A pattern that matches none of them, or more partitions than there are
                parameters or runs.
        """
        factors: dict[str, float] = {}
        for pattern, factor in zip(self.sigma_patterns, self.sigma_factors, strict=True):
            matched = _matched("sigma_patterns", [pattern], list(shapes), "perturbed parameter")
            factors |= dict.fromkeys(matched - factors.keys(), factor)
        units = together or [(name,) for name in shapes]
        sizes = tuple(sum(math.prod(shapes[name]) for name in unit) for unit in units)
        num_runs = sum(-(-math.prod(shape) // RUN) for shape in shapes.values())
        most, what = len(units), "the number of weights that are perturbed"
        if divided:
            most, what = min(num_runs, LANE_VALUES), f"the number of runs of {RUN:,} elements"
        if self.partitions > max(1, most):
            raise ConfigError(
                f"search_space.partitions must be at most {most}, {what}, found {self.partitions}"
            )
        if divided or self.partitions == 1:
            return Shares(factors, self.partitions)
        own = {name: u for u, unit in enumerate(units) for name in unit}
        return Shares(factors, self.partitions, own, sizes)


def linear_shapes(
    builder: SearchSpaceBuilder, parameters: Sequence[ParameterInfo]
) -> dict[str, tuple[int, int]]:
    """Return the shapes of the linear weights that a builder selects; for spaces of only these.

    Raises:
        ConfigError: A pattern names none, or none is left.
    """
    kind = type(builder).__name__
    selected = builder.select(parameters)
    for pattern in builder.include:
        if "linear" not in {p.kind for p in parameters if matching(p.name, pattern)}:
            raise ConfigError(
                f"search_space.include pattern {pattern!r} names no linear weight, and {kind} "
                "perturbs linear weights only; leave it out, or use FullRank"
            )
    shapes = {p.name: (p.shape[0], p.shape[1]) for p in selected if p.kind == "linear"}
    if not shapes:
        raise ConfigError(
            f"search_space selects no linear weight: include {list(builder.include)} and exclude "
            f"{list(builder.exclude)} leave none, and {kind} perturbs nothing else"
        )
    return shapes


def refuse_quantised(
    builder: SearchSpaceBuilder, parameters: Sequence[ParameterInfo], names: Iterable[str]
) -> None:
    """Raise a ConfigError where a selected weight is quantised: it has no numbers to move."""
    bits = {p.name: p.bits for p in parameters if p.bits is not None}
    for name in names:
        if name in bits:
            raise ConfigError(
                f"search_space: {type(builder).__name__} moves weights, and {name} is quantised to "
                f"{bits[name]} bits; accepted are adapter, on engine=torch quant_scales and "
                "quant_codes where codes are whole numbers, or leave quantised weights out "
                "(search_space.exclude)"
            )


def matching(name: str, pattern: str) -> bool:
    """Return whether a name is a shell pattern or matches it (`*`, `?`, `[...]`; `*` crosses dots).

    >>> matching("experts.down_proj[3]", "experts.down_proj[3]")
    True
    """
    return name == pattern or fnmatch.fnmatchcase(name, pattern)


def layer_of(name: str) -> str | None:
    """Return the name of the layer that a parameter is in: its own up to the first number.

    >>> layer_of("model.layers.3.mlp.up_proj.weight"), layer_of("lm_head.weight")
    ('model.layers.3', None)
    """
    found = _LAYER.match(name)
    return found and found[0]


def _matched(
    field: str, patterns: Sequence[str], names: Sequence[str], what: str = "parameter of the model"
) -> set[str]:
    matched: set[str] = set()
    for pattern in patterns:
        hits = [name for name in names if matching(name, pattern)]
        if not hits:
            near = difflib.get_close_matches(pattern.strip("*"), names, n=3, cutoff=0.0)
            raise ConfigError(
                f"search_space.{field} pattern {pattern!r} matches no {what}; "
                f"the nearest names are {', '.join(near)}"
            )
        matched.update(hits)
    return matched


def pieces(weight: "torch.Tensor", part: Part) -> Iterator[tuple[int, int, NDArray[np.float32]]]:
    """Yield a weight's own memory in pieces that stay in the cache while they gain many terms.

    Yields:
        Place of a piece's first element in the parameter, one past its last, and the piece.
    """
    flat, done = as_array(weight).reshape(-1), 0
    for span in part.spans():
        for start in span[::PIECE]:
            stop = min(start + PIECE, span.stop)
            yield start, stop, flat[done : done + stop - start]
            done += stop - start


def as_array(weight: "torch.Tensor") -> NDArray[np.float32]:
    """Return the tensor's own memory as a NumPy array, in which the exact arithmetic is done.

    Raises:
        ValueError: Not contiguous float32 on the CPU.
    """
    array = weight.detach().numpy()
    if array.dtype != np.float32 or not array.flags.c_contiguous:
        raise ValueError(f"exact arithmetic needs contiguous float32, found {weight.dtype}")
    return array
