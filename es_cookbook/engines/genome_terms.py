"""Genomes' factors, written into an engine's tables or LoRA slots.

Low-rank genomes and adapters are hosted alike: two factors for each weight and genome. On the CPU
they are made weight by weight; twins, and any genomes that share a seed, share the making of their
noise. On a GPU they are collected first, and then all made in one launch, straight into their
places.
"""

import functools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import torch
from typing_extensions import override

from es_cookbook.common.errors import EngineError
from es_cookbook.evolution.centre import Centre, on_gpu
from es_cookbook.evolution.genome import Genome, Term
from es_cookbook.evolution.noise.tensors import Part
from es_cookbook.evolution.spaces.base import SearchSpace
from es_cookbook.evolution.spaces.factors import AdapterFactors

if TYPE_CHECKING:
    from es_cookbook.evolution.noise.triton.kernels import Entries, Job

Places: TypeAlias = slice | torch.Tensor
"""Rows or columns of a weight: neighbours, or whole numbers, in the order in which they stand."""
_ALL = slice(None)


class Slots(NamedTuple):
    """Where the factors of one linear weight go: LoRA slots, or rows of a table.

    Attributes:
        name: the weight's Hugging Face name.
        a: (slots, rank, columns), any strides: what multiplies the input.
        b: (slots, rows, rank), any strides: what gives the output, scale included.
        rows: which of the weight's rows `b` has.
        columns: which of its columns `a` has.
    """

    name: str
    a: torch.Tensor
    b: torch.Tensor
    rows: Places = _ALL
    columns: Places = _ALL

    @property
    def mT(self) -> "Slots":
        """Of a weight that is stored (in, out), whose rows are inputs."""
        return Slots(self.name, self.b.mT, self.a.mT, self.columns, self.rows)


class GenomeFactors(ABC):
    """The factors of a block of genomes, ready to be written, weight by weight.

    Attributes:
        num_genomes: how many they are.
        num_ranks: the most ranks that one of them has.
    """

    num_genomes: int
    num_ranks: int

    def __init__(self, space: SearchSpace, device: torch.device) -> None:
        self._space, self._device = space, device
        self._in_one_launch = on_gpu(device)
        self._kinds = space.shares.kinds(list(space.shapes))
        self._jobs: list[Job] = []

    def write(self, slots: Slots) -> None:
        """Write one weight's factors of all genomes, `finish` at the latest; all else stays."""
        rows, columns = slots.rows, slots.columns
        if not self.num_ranks:
            return
        if self._in_one_launch and isinstance(rows, slice) and isinstance(columns, slice):
            self._jobs += self._collected(slots, rows, columns)
        else:
            self._write(slots)

    def finish(self) -> None:
        """Make what is not written yet; the tensors must not have moved since."""
        if self._jobs:
            from es_cookbook.evolution.noise.triton.kernels import fill

            fill(self._jobs, self._entries(), self._space.noise, self._space.mask)
            self._jobs = []

    def _kind(self, name: str) -> int:
        return list(self._kinds).index(self._space.shares.kind(name))

    @abstractmethod
    def _write(self, slots: Slots) -> None:
        """Write them now."""

    @abstractmethod
    def _collected(self, slots: Slots, rows: slice, columns: slice) -> "Iterable[Job]":
        """What is to be written in one launch."""

    @abstractmethod
    def _entries(self) -> "Entries":
        """Who is written in it."""


class _Terms(NamedTuple):
    """What weights with the same share of every term have of the genomes' terms."""

    seeds: Sequence[int]
    place_t_G: Sequence[torch.Tensor]
    scale_t_G: Sequence[torch.Tensor]
    terms_G: Sequence[Sequence[Term]]


class GenomeTerms(GenomeFactors):
    """Low-rank genomes: Bᵀ in `lora_a`, and scale · A, rounded to float32 and cast, in `lora_b`.

    Genome g has place g, and its term t the ranks from t · rank on.

    Args:
        genomes_G: a block of the population.
        space: what they perturb, by `low_rank` terms.
        device: where their factors are made: the CPU, or one that `noise_device` returns.

    Raises:
        EngineError: One of them is given by coordinates.
    """

    def __init__(
        self, genomes_G: Sequence[Genome], space: SearchSpace, device: torch.device
    ) -> None:
        super().__init__(space, device)
        if any(genome.offsets is not None for genome in genomes_G):
            raise EngineError(
                "genomes given by coordinates (CMA-ES) have no low-rank form; use search_space="
                "adapter or singular_values"
            )
        assert space.low_rank is not None
        self._low_rank = space.low_rank
        self.num_genomes = len(genomes_G)
        self._num_terms = max((len(genome.terms) for genome in genomes_G), default=0)
        self.num_ranks = self._num_terms * self._low_rank.rank
        self._of_kind = [self._shared(name, genomes_G) for name in self._kinds.values()]

    def _shared(self, name: str, genomes_G: Sequence[Genome]) -> _Terms:
        shares, low_rank = self._space.shares, self._low_rank
        seeds = sorted({term.seed for genome in genomes_G for term in genome.terms})
        # Noise of seeds that have no part in the weight need not be made, but some has to be.
        seeds = [seed for seed in seeds if shares.of(name, [Term(seed, 1.0)])] or seeds[:1]
        place_of_seed = {seed: place for place, seed in enumerate(seeds)}

        def own(genome: Genome, t: int) -> Term:
            """A genome with fewer terms, or no part in the weight, has nothing of the first."""
            found = shares.of(name, genome.terms[t : t + 1])
            return found[0] if found else Term(seeds[0], 0.0)

        terms_G = [[own(genome, t) for t in range(self._num_terms)] for genome in genomes_G]
        terms_t_G = list(zip(*terms_G, strict=True))
        return _Terms(
            seeds,
            [torch.tensor([place_of_seed[term.seed] for term in of_G]) for of_G in terms_t_G],
            [
                torch.from_numpy(low_rank.scales([term.coefficient for term in of_G]))
                for of_G in terms_t_G
            ],
            terms_G,
        )

    @override
    def _write(self, slots: Slots) -> None:
        rank, own = self._low_rank.rank, self._of_kind[self._kind(slots.name)]
        height, width = self._space.shapes[slots.name]
        factors_S = self._low_rank.factors_S(slots.name, (height, width), own.seeds)
        a_S, b_S = map(torch.from_numpy, factors_S)
        a_S, b_S = a_S[:, slots.rows], b_S[:, slots.columns]
        for t, (place_G, scale_G) in enumerate(zip(own.place_t_G, own.scale_t_G, strict=True)):
            ranks = slice(t * rank, (t + 1) * rank)
            slots.a[: self.num_genomes, ranks] = b_S[place_G].mT.to(slots.a)
            scaled_G = a_S[place_G] * scale_G[:, None, None]
            slots.b[: self.num_genomes, :, ranks] = scaled_G.to(slots.b)

    @override
    def _collected(self, slots: Slots, rows: slice, columns: slice) -> "Iterable[Job]":
        from es_cookbook.evolution.noise.triton.kernels import low_rank_jobs

        part = Part.within(self._space.shapes[slots.name], rows, columns)
        kind = self._kind(slots.name)
        return low_rank_jobs(slots.name, slots.a, slots.b, self._low_rank.rank, part, kind)

    @override
    def _entries(self) -> "Entries":
        from es_cookbook.evolution.noise.triton.kernels import low_rank_entries

        terms_of = [own.terms_G for own in self._of_kind]
        return low_rank_entries(terms_of, self._low_rank.rank, self._device)


class GenomeAdapters(GenomeFactors):
    """Adapters of genomes: A in `lora_a`, and s · B, rounded to float32 and cast, in `lora_b`.

    Args:
        genomes_G: a block of the population, each at the place that `places_G` says.
        space: the adapter's.
        adapter: the space's own.
        centre: what genomes begin at.
        device: where their factors are made, and where the centre is.
    """

    def __init__(
        self,
        genomes_G: Sequence[Genome],
        places_G: Sequence[int],
        space: SearchSpace,
        adapter: AdapterFactors,
        centre: Centre,
        device: torch.device,
    ) -> None:
        super().__init__(space, device)
        self._genomes_G, self._places_G = genomes_G, places_G
        self._adapter, self._centre = adapter, centre
        self.num_genomes, self.num_ranks = len(genomes_G), adapter.lora.rank
        at_centre = all(genome.offsets is None for genome in genomes_G)
        self._in_one_launch &= adapter.are_parameters and at_centre

    @override
    def _write(self, slots: Slots) -> None:
        ranks, scale = slice(0, self.num_ranks), self._adapter.lora.scale
        values_G = [functools.partial(self._centre.perturbed, g) for g in self._genomes_G]
        factors_G = self._adapter.factors(slots.name, values_G)
        for place, (a, b) in zip(self._places_G, factors_G, strict=True):
            slots.a[place, ranks] = a[:, slots.columns].to(slots.a)
            slots.b[place, :, ranks] = (b[slots.rows] * scale).to(slots.b)

    @override
    def _collected(self, slots: Slots, rows: slice, columns: slice) -> "Iterable[Job]":
        from es_cookbook.evolution.noise.triton.kernels import Job

        a, b = self._adapter.targets[slots.name]
        ranks, scale = slice(0, self.num_ranks), self._adapter.lora.scale
        for factor, out, of_factor, by in (
            (a, slots.a[:, ranks], (_ALL, columns), 1.0),
            (b, slots.b[:, :, ranks], (rows, _ALL), scale),
        ):
            part = Part.within(self._space.shapes[factor], *of_factor)
            centre = self._centre.weights[factor][of_factor]
            yield Job(out, factor, part, centre=centre, factor=by, kind=self._kind(factor))

    @override
    def _entries(self) -> "Entries":
        from es_cookbook.evolution.noise.triton.kernels import dense_entries

        terms_of = [
            [self._space.shares.of(name, genome.terms) for genome in self._genomes_G]
            for name in self._kinds.values()
        ]
        return dense_entries(terms_of, self._places_G, self._device)
