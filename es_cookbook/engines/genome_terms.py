"""Genomes' factors, written into an engine's tables or LoRA slots.

Low-rank genomes and adapters are hosted alike: two factors for each weight and genome. On the CPU
they are made weight by weight, and noise once for all genomes that share a seed. On a GPU they are
collected first, and then all made in one launch, directly in their places.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import torch

from es_cookbook.common.errors import EngineError
from es_cookbook.evolution.centre import Centre, on_gpu
from es_cookbook.evolution.genome import Genome, Term
from es_cookbook.evolution.noise import Part
from es_cookbook.evolution.spaces.base import SearchSpace
from es_cookbook.evolution.spaces.factors import AdapterFactors, term_scales

if TYPE_CHECKING:
    from es_cookbook.evolution.noise.triton_kernels import Job

Places: TypeAlias = slice | torch.Tensor
"""Rows or columns of a weight: neighbours, or whole numbers, in the order in which they stand."""
_ALL = slice(None)


class Slots(NamedTuple):
    """Destination of one linear weight's factors: LoRA slots, or rows of a table.

    Attributes:
        name: the weight's Hugging Face name.
        a: (slots, rank, columns), any strides: what multiplies the input.
        b: (slots, rows, rank), any strides: what gives the output, scale included.
        rows: the weight's rows that `b` has.
        columns: its columns that `a` has.
    """

    name: str
    a: torch.Tensor
    b: torch.Tensor
    rows: Places = _ALL
    columns: Places = _ALL

    @property
    def mT(self) -> "Slots":
        """The slots of a weight stored as (in, out), whose rows are inputs."""
        return Slots(self.name, self.b.mT, self.a.mT, self.columns, self.rows)


class _Terms(NamedTuple):
    """The genomes' terms, for weights with the same share of every term."""

    seeds: Sequence[int]
    place_t_G: Sequence[torch.Tensor]
    scale_t_G: Sequence[torch.Tensor]
    terms_G: Sequence[Sequence[Term]]


class GenomeFactors:
    """The factors of a block of genomes, ready to be written, weight by weight.

    For low-rank genomes, Bᵀ goes into `Slots.a`, and scale · A, rounded to float32 and cast, into
    `Slots.b`; term t has the ranks from t · rank on. For adapters, these are A and s · B.

    Args:
        genomes_G: a block of the population.
        space: their search space, of low-rank terms or of an adapter.
        device: device that makes their factors: the CPU, or one that `noise_device` returns.
        centre: start of adapters.
        places_G: adapters' places in the slots; 0, 1, ... if not given, as for low-rank genomes.

    Attributes:
        num_genomes: number of genomes.
        num_ranks: largest number of ranks of a genome.

    Raises:
        EngineError: A low-rank one is given by coordinates.
    """

    def __init__(
        self,
        genomes_G: Sequence[Genome],
        space: SearchSpace,
        device: torch.device,
        centre: Centre | None = None,
        places_G: Sequence[int] | None = None,
    ) -> None:
        self._genomes_G, self._space, self._device, self._centre = genomes_G, space, device, centre
        self._places_G = range(len(genomes_G)) if places_G is None else places_G
        terms = [term for genome in genomes_G for term in genome.terms]
        self._of_each_kind, self._kinds = space.shares.kinds(list(space.shapes), terms)
        self._in_one_launch = on_gpu(device) and not space.makes_own_factors
        self._jobs: list[Job] = []
        self.num_genomes = len(genomes_G)
        has_coordinates = any(genome.offsets is not None for genome in genomes_G)
        if space.adapter is not None:
            self.num_ranks = space.adapter.lora.rank
            self._in_one_launch &= space.adapter.are_parameters and not has_coordinates
            return
        if has_coordinates:
            raise EngineError(
                "genomes given by coordinates (CMA-ES) have no low-rank form; use "
                "search_space=adapter"
            )
        assert space.rank is not None
        self._num_terms = max((len(genome.terms) for genome in genomes_G), default=0)
        self.num_ranks = self._num_terms * space.rank
        self._of_kind = [self._shared(name, space.rank) for name in self._of_each_kind]

    def _shared(self, name: str, rank: int) -> _Terms:
        shares, genomes_G = self._space.shares, self._genomes_G
        seeds = sorted({term.seed for genome in genomes_G for term in genome.terms})
        # Noise of seeds without a part in the weight need not be made, but some has to be.
        seeds = [seed for seed in seeds if shares.own(name, [Term(seed, 1.0)])] or seeds[:1]
        place_of_seed = {seed: place for place, seed in enumerate(seeds)}

        def own(genome: Genome, t: int) -> Term:
            """Return term t, or the first seed times 0 if the weight has no such term."""
            found = shares.own(name, genome.terms[t : t + 1])
            return found[0] if found else Term(seeds[0], 0.0)

        terms_G = [[own(genome, t) for t in range(self._num_terms)] for genome in genomes_G]
        terms_t_G = list(zip(*terms_G, strict=True))
        place_t_G = [torch.tensor([place_of_seed[t.seed] for t in of_G]) for of_G in terms_t_G]
        scale_t_G = [term_scales([t.coefficient for t in of_G], rank) for of_G in terms_t_G]
        return _Terms(seeds, place_t_G, list(map(torch.from_numpy, scale_t_G)), terms_G)

    def write(self, slots: Slots) -> None:
        """Write one weight's factors of all genomes, `finish` at the latest; all else stays."""
        rows, columns = slots.rows, slots.columns
        if not self.num_ranks:
            return
        if self._in_one_launch and isinstance(rows, slice) and isinstance(columns, slice):
            self._jobs += self._collected(slots, rows, columns)
        elif self._space.adapter is not None:
            self._write_adapters(slots, self._space.adapter)
        else:
            self._write_terms(slots)

    def finish(self) -> None:
        """Write all pending factors; the tensors must not have moved since."""
        if not self._jobs:
            return
        from es_cookbook.evolution.noise.triton_kernels import entries_of, fill

        space = self._space
        if space.rank is not None:
            terms_of = [own.terms_G for own in self._of_kind]
        else:
            names = self._of_each_kind
            terms_of = [[space.shares.own(n, g.terms) for g in self._genomes_G] for n in names]
        entries = entries_of(terms_of, self._places_G, self._device, space.rank)
        fill(self._jobs, entries, space.noise)
        self._jobs = []

    def _write_terms(self, slots: Slots) -> None:
        space, own = self._space, self._of_kind[self._kinds[slots.name]]
        assert space.rank is not None
        factors_S = space.term_factors(slots.name, own.seeds)
        a_S, b_S = map(torch.from_numpy, factors_S)
        a_S, b_S = a_S[:, slots.rows], b_S[:, slots.columns]
        for t, (place_G, scale_G) in enumerate(zip(own.place_t_G, own.scale_t_G, strict=True)):
            ranks = slice(t * space.rank, (t + 1) * space.rank)
            slots.a[: self.num_genomes, ranks] = b_S[place_G].mT.to(slots.a)
            scaled_G = a_S[place_G] * scale_G[:, None, None]
            slots.b[: self.num_genomes, :, ranks] = scaled_G.to(slots.b)

    def _write_adapters(self, slots: Slots, adapter: AdapterFactors) -> None:
        assert self._centre is not None
        ranks, scale = slice(0, self.num_ranks), adapter.lora.scale
        values_G = [functools.partial(self._centre.perturbed, g) for g in self._genomes_G]
        factors_G = adapter.factors(slots.name, values_G)
        for place, (a, b) in zip(self._places_G, factors_G, strict=True):
            slots.a[place, ranks] = a[:, slots.columns].to(slots.a)
            slots.b[place, :, ranks] = (b[slots.rows] * scale).to(slots.b)

    def _collected(self, slots: Slots, rows: slice, columns: slice) -> "Iterator[Job]":
        """Collect the tensors to be written in one launch."""
        from es_cookbook.evolution.noise.triton_kernels import Job

        space = self._space
        if space.rank is not None:
            rank, kind = space.rank, self._kinds[slots.name]
            of_a, of_b = ((side, rank) for side in space.shapes[slots.name])
            a, b = Part.within(of_a, rows, _ALL), Part.within(of_b, columns, _ALL)
            yield Job(slots.b, f"{slots.name}.A", a, kind=kind)
            yield Job(slots.a.mT, f"{slots.name}.B", b, scaled=False, kind=kind)
            return
        assert space.adapter is not None and self._centre is not None
        name_a, name_b = space.adapter.targets[slots.name]
        ranks, scale = slice(0, self.num_ranks), space.adapter.lora.scale
        for factor, out, of_factor, by in (
            (name_a, slots.a[:, ranks], (_ALL, columns), 1.0),
            (name_b, slots.b[:, :, ranks], (rows, _ALL), scale),
        ):
            part = Part.within(space.shapes[factor], *of_factor)
            centre = self._centre.weights[factor][of_factor]
            yield Job(out, factor, part, centre=centre, factor=by, kind=self._kinds[factor])
