"""Low-rank genomes' factors, written into an engine's tables or slots.

On the CPU twins, and any genomes that share a seed, share the making of their noise. On a GPU it is
made for each of them, straight into its place.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from es_cookbook.common.errors import EngineError
from es_cookbook.evolution.devices import on_gpu
from es_cookbook.evolution.genome import Genome, Term
from es_cookbook.evolution.noise.part import Part
from es_cookbook.evolution.spaces.base import SearchSpace

if TYPE_CHECKING:
    from es_cookbook.evolution.noise.triton.kernels import SlotTerms

_ALL = slice(None)


class _Terms(NamedTuple):
    """What weights with the same share of every term have of the genomes' terms."""

    seeds: Sequence[int]
    place_t_G: Sequence[torch.Tensor]
    scale_t_G: Sequence[torch.Tensor]
    sent_t: "Sequence[SlotTerms] | None"


class GenomeTerms:
    """The low-rank factors of a block of genomes, ready to be written.

    Args:
        genomes_G: a block of the population.
        space: what they perturb, by `low_rank` terms.
        device: where their factors are made: the CPU, or one that `devices.noise_device` returns.

    Attributes:
        num_genomes: how many they are.
        num_ranks: the most ranks that the terms of one of them have.

    Raises:
        EngineError: One of them is given by coordinates.
    """

    def __init__(
        self, genomes_G: Sequence[Genome], space: SearchSpace, device: torch.device
    ) -> None:
        if any(genome.offsets is not None for genome in genomes_G):
            raise EngineError(
                "genomes given by coordinates (CMA-ES) have no low-rank form; use search_space="
                "adapter or singular_values"
            )
        assert space.low_rank is not None
        self._space, self._low_rank = space, space.low_rank
        self.num_genomes = len(genomes_G)
        self._num_terms = max((len(genome.terms) for genome in genomes_G), default=0)
        self.num_ranks = self._num_terms * self._low_rank.rank
        self._of_kind = {
            kind: self._shared(name, genomes_G, device)
            for kind, name in space.shares.kinds(list(space.shapes)).items()
        }

    def _shared(self, name: str, genomes_G: Sequence[Genome], device: torch.device) -> _Terms:
        shares, low_rank = self._space.shares, self._low_rank
        seeds = sorted({term.seed for genome in genomes_G for term in genome.terms})
        # Noise of seeds that have no part in the weight need not be made, but some has to be.
        seeds = [seed for seed in seeds if shares.of(name, [Term(seed, 1.0)])] or seeds[:1]
        place_of_seed = {seed: place for place, seed in enumerate(seeds)}

        def own(genome: Genome, t: int) -> Term:
            """A genome with fewer terms, or no part in the weight, has nothing of the first."""
            found = shares.of(name, genome.terms[t : t + 1])
            return found[0] if found else Term(seeds[0], 0.0)

        terms_t_G = [[own(genome, t) for genome in genomes_G] for t in range(self._num_terms)]
        return _Terms(
            seeds,
            [torch.tensor([place_of_seed[t.seed] for t in terms_G]) for terms_G in terms_t_G],
            [
                torch.tensor([float(low_rank.scale(term.coefficient)) for term in terms_G])
                for terms_G in terms_t_G
            ],
            _send(terms_t_G, low_rank.rank, device) if on_gpu(device) else None,
        )

    def write(
        self,
        name: str,
        lora_a: torch.Tensor,
        lora_b: torch.Tensor,
        rows: slice | torch.Tensor = _ALL,
        columns: slice | torch.Tensor = _ALL,
    ) -> None:
        """Write one weight's factors of all genomes: Bᵀ, and scale · A rounded to float32 and cast.

        Term t of genome g takes the ranks from t · rank on at place g; all else stays as it is.
        `lora_a` is (places, ranks, columns) and `lora_b` (places, rows, ranks), of these rows and
        columns of the weight, with any strides.
        """
        if not self._num_terms:
            return
        own = self._of_kind[self._space.shares.kind(name)]
        rank = self._low_rank.rank
        ranks_t = [slice(t * rank, (t + 1) * rank) for t in range(self._num_terms)]
        height, width = self._space.shapes[name]
        if own.sent_t is not None and isinstance(rows, slice) and isinstance(columns, slice):
            from es_cookbook.evolution.noise.triton.kernels import factors_into

            part = Part(rows.indices(height)[:2], columns.indices(width)[:2], width)
            for ranks, terms in zip(ranks_t, own.sent_t, strict=True):
                a, b = lora_a[:, ranks], lora_b[:, :, ranks]
                factors_into(a, b, name, terms, self._low_rank.noise, part)
            return
        factors_S = self._low_rank.factors_S(name, (height, width), own.seeds)
        a_S, b_S = map(torch.from_numpy, factors_S)
        a_S, b_S = a_S[:, rows], b_S[:, columns]
        for ranks, place_G, scale_G in zip(ranks_t, own.place_t_G, own.scale_t_G, strict=True):
            lora_a[: self.num_genomes, ranks] = b_S[place_G].mT.to(lora_a)
            scaled_G = a_S[place_G] * scale_G[:, None, None]
            lora_b[: self.num_genomes, :, ranks] = scaled_G.to(lora_b)


def _send(
    terms_t_G: Sequence[Sequence[Term]], rank: int, device: torch.device
) -> "list[SlotTerms]":
    from es_cookbook.evolution.noise.triton.kernels import slot_terms

    return [slot_terms(terms_G, range(len(terms_G)), rank, device) for terms_G in terms_t_G]
