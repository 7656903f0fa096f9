"""Genomes' factors, written into an engine's tables or LoRA slots.

Low-rank genomes and adapters are hosted alike: two factors for each weight and genome. On the CPU
they are made weight by weight; twins, and any genomes that share a seed, share the making of their
noise. On a GPU they are collected first, and then all made in one launch, straight into their
places.
"""

import functools
from abc import ABC, abstractmethod
from collections.abc import Sequence
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
    from es_cookbook.evolution.noise.triton.slots import Job

_ALL = slice(None)
_Places: TypeAlias = slice | torch.Tensor


class GenomeFactors(ABC):
    """The factors of a block of genomes, ready to be written, weight by weight.

    Attributes:
        num_genomes: how many they are.
        num_ranks: the most ranks that one of them has.
    """

    num_genomes: int
    num_ranks: int

    def __init__(self) -> None:
        self._jobs: list[Job] = []

    @abstractmethod
    def write(
        self,
        name: str,
        lora_a: torch.Tensor,
        lora_b: torch.Tensor,
        rows: _Places = _ALL,
        columns: _Places = _ALL,
    ) -> None:
        """Write one weight's factors of all genomes, `finish` at the latest; all else stays.

        Args:
            name: the weight's.
            lora_a: (places, ranks, columns), any strides: what reads the inputs.
            lora_b: (places, rows, ranks), any strides: what makes the outputs, scale included.
            rows: of the weight, those that `lora_b` has.
            columns: those that `lora_a` has.
        """

    @abstractmethod
    def finish(self) -> None:
        """Make what is not written yet; the tensors must not have moved since."""


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
        super().__init__()
        if any(genome.offsets is not None for genome in genomes_G):
            raise EngineError(
                "genomes given by coordinates (CMA-ES) have no low-rank form; use search_space="
                "adapter or singular_values"
            )
        assert space.low_rank is not None
        self._space, self._low_rank, self._device = space, space.low_rank, device
        self.num_genomes = len(genomes_G)
        self._num_terms = max((len(genome.terms) for genome in genomes_G), default=0)
        self.num_ranks = self._num_terms * self._low_rank.rank
        self._of_kind = {
            kind: self._shared(name, genomes_G)
            for kind, name in space.shares.kinds(list(space.shapes)).items()
        }

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
    def write(
        self,
        name: str,
        lora_a: torch.Tensor,
        lora_b: torch.Tensor,
        rows: _Places = _ALL,
        columns: _Places = _ALL,
    ) -> None:
        if not self._num_terms:
            return
        kind = self._space.shares.kind(name)
        rank = self._low_rank.rank
        height, width = self._space.shapes[name]
        if on_gpu(self._device) and isinstance(rows, slice) and isinstance(columns, slice):
            from es_cookbook.evolution.noise.triton.slots import low_rank_jobs

            part = Part(rows.indices(height)[:2], columns.indices(width)[:2], width)
            number = list(self._of_kind).index(kind)
            self._jobs += low_rank_jobs(name, lora_a, lora_b, rank, part, number)
            return
        own = self._of_kind[kind]
        factors_S = self._low_rank.factors_S(name, (height, width), own.seeds)
        a_S, b_S = map(torch.from_numpy, factors_S)
        a_S, b_S = a_S[:, rows], b_S[:, columns]
        for t, (place_G, scale_G) in enumerate(zip(own.place_t_G, own.scale_t_G, strict=True)):
            ranks = slice(t * rank, (t + 1) * rank)
            lora_a[: self.num_genomes, ranks] = b_S[place_G].mT.to(lora_a)
            scaled_G = a_S[place_G] * scale_G[:, None, None]
            lora_b[: self.num_genomes, :, ranks] = scaled_G.to(lora_b)

    @override
    def finish(self) -> None:
        if self._jobs:
            from es_cookbook.evolution.noise.triton.slots import fill, low_rank_entries

            terms_K_G = [own.terms_G for own in self._of_kind.values()]
            entries = low_rank_entries(terms_K_G, self._low_rank.rank, self._device)
            fill(self._jobs, entries, self._low_rank.noise)
            self._jobs = []


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
        super().__init__()
        self._genomes_G, self._places_G = genomes_G, places_G
        self._space, self._adapter, self._centre = space, adapter, centre
        self._device = device
        self.num_genomes, self.num_ranks = len(genomes_G), adapter.lora.rank
        self._kinds = space.shares.kinds(list(space.shapes))
        at_centre = all(genome.offsets is None for genome in genomes_G)
        self._in_one_launch = on_gpu(device) and adapter.are_parameters and at_centre

    @override
    def write(
        self,
        name: str,
        lora_a: torch.Tensor,
        lora_b: torch.Tensor,
        rows: _Places = _ALL,
        columns: _Places = _ALL,
    ) -> None:
        ranks, scale = slice(0, self.num_ranks), self._adapter.lora.scale
        if self._in_one_launch and isinstance(rows, slice) and isinstance(columns, slice):
            a, b = self._adapter.targets[name]
            self._collect(a, lora_a[:, ranks], _ALL, columns, 1.0)
            self._collect(b, lora_b[:, :, ranks], rows, _ALL, scale)
            return
        values_G = [functools.partial(self._centre.perturbed, g) for g in self._genomes_G]
        factors_G = self._adapter.factors(name, values_G)
        for place, (of_a, of_b) in zip(self._places_G, factors_G, strict=True):
            lora_a[place, ranks] = of_a[:, columns].to(lora_a)
            lora_b[place, :, ranks] = (of_b[rows] * scale).to(lora_b)

    def _collect(
        self, factor: str, out: torch.Tensor, rows: slice, columns: slice, scale: float
    ) -> None:
        from es_cookbook.evolution.noise.triton.slots import Job

        height, width = self._space.shapes[factor]
        part = Part(rows.indices(height)[:2], columns.indices(width)[:2], width)
        centre = self._centre.weights[factor][rows, columns]
        kind = list(self._kinds).index(self._space.shares.kind(factor))
        self._jobs.append(Job(out, factor, part, centre=centre, factor=scale, kind=kind))

    @override
    def finish(self) -> None:
        if self._jobs:
            from es_cookbook.evolution.noise.triton.slots import dense_entries, fill

            terms_K_G = [
                [self._space.shares.of(name, genome.terms) for genome in self._genomes_G]
                for name in self._kinds.values()
            ]
            entries = dense_entries(terms_K_G, self._places_G, self._device)
            fill(self._jobs, entries, self._space.noise, self._space.mask)
            self._jobs = []
