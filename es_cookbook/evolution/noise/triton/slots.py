"""All factors of all genomes of a block, written where they sample from by one launch.

Engines host low-rank genomes and adapters as two factors a weight: LoRA slots, or rows of tables. A
model has hundreds of weights and a block of genomes dozens of members, so a launch for each would
take far longer than the noise does. Here one grid has all tiles of all factors along its first axis
and all genomes along its second; a table says which tensor a tile belongs to, and where that is.

    jobs = [job for name in weights for job in low_rank_jobs(name, a[name], b[name], rank)]
    fill(jobs, low_rank_entries([terms_G], rank, device))

Every number is what NumPy's arithmetic makes, rounded to float32, and then cast once.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple, cast

import numpy as np
import torch

from es_cookbook.evolution.genome import Term
from es_cookbook.evolution.noise.tensors import Mask, NoiseKind, Part, mask_name
from es_cookbook.evolution.noise.triton import programs
from es_cookbook.evolution.noise.triton.kernels import (
    MAX_GRID,
    check_tensors,
    key_of,
    launch,
    part_runs,
    table,
    tiles_of,
)


class Entries(NamedTuple):
    """Who is written, on a device: each entry is a genome, or one term of a low-rank one.

    Attributes:
        places_E: int64, where in the tensors.
        shifts_E: int64, by how many columns it is shifted.
        seeds_K_E_S: int64, of parameters of each kind (those with the same share of all terms).
        scales_K_E_S: float32; a scale of 0 stands where there is no term.
        rank: of low-rank terms; None where the noise is dense.
        num_places: one more than the last place.
        most_shifted: columns before those of the last term.
    """

    places_E: torch.Tensor
    shifts_E: torch.Tensor
    seeds_K_E_S: torch.Tensor
    scales_K_E_S: torch.Tensor
    rank: int | None
    num_places: int
    most_shifted: int


@dataclasses.dataclass(frozen=True)
class Job:
    """One tensor to be written.

    Attributes:
        out: (places, rows, columns), any strides; it has to stay where it is until it is written.
        name: of the parameter whose noise it has.
        part: of that parameter, the one that it holds; for low-rank terms, of one term.
        scaled: whether low-rank noise is multiplied by the term's scale.
        centre: dense noise is added to this, (rows, columns) in float32, any strides.
        factor: on centre and noise together.
        kind: first index of the entries' seeds.
    """

    out: torch.Tensor
    name: str
    part: Part
    scaled: bool = True
    centre: torch.Tensor | None = None
    factor: float = 1.0
    kind: int = 0

    def __post_init__(self) -> None:
        if self.out.ndim != 3 or self.out.shape[1] != self.part.shape[0]:
            raise ValueError(
                f"{self.name}: a tensor of shape {tuple(self.out.shape)} does not hold places of "
                f"{self.part}"
            )
        if self.centre is not None and (
            self.centre.dtype != torch.float32 or self.centre.shape != self.part.shape
        ):
            raise ValueError(
                f"{self.name}: the centre must be float32 of shape {self.part.shape}, found "
                f"{self.centre.dtype} of shape {tuple(self.centre.shape)}"
            )

    def check_room(self, entries: Entries) -> None:
        """Refuse entries that the tensor has no room for."""
        places, *place = self.out.shape
        width = self.part.shape[1] + entries.most_shifted
        if place[1] < width:
            raise ValueError(
                f"{self.name}: a place of shape {tuple(place)} has no room for {width} columns"
            )
        if entries.num_places > places:
            raise ValueError(f"{self.name}: place {entries.num_places - 1} is one of {places}")


def low_rank_jobs(
    name: str,
    lora_a: torch.Tensor,
    lora_b: torch.Tensor,
    rank: int,
    part: Part | None = None,
    kind: int = 0,
) -> Iterator[Job]:
    """The two factors of a weight's low-rank terms: Bᵀ in `lora_a`, scale · A in `lora_b`.

    A LoRA layer computes y += (x lora_aᵀ) lora_bᵀ.

    Args:
        name: the weight's; its factors are noise of `name` + ".A" and ".B".
        lora_a: (places, at least all terms' ranks, in), any strides.
        lora_b: (places, out, ranks), any strides.
        rank: of a term.
        part: of the weight (out, in), these outputs and inputs; all if None.
        kind: of its share of terms.
    """
    part = part or Part.whole((lora_b.shape[1], lora_a.shape[2]))
    rows, columns = (Part(side, (0, rank), rank) for side in (part.rows, part.columns))
    yield Job(lora_b, f"{name}.A", rows, kind=kind)
    yield Job(lora_a.mT, f"{name}.B", columns, scaled=False, kind=kind)


def low_rank_entries(
    terms_K_G: Sequence[Sequence[Sequence[Term]]], rank: int, device: torch.device
) -> Entries:
    """Low-rank genomes at places 0, 1, ...; term t of each is shifted by t · rank columns.

    Args:
        terms_K_G: of each kind of parameter, each genome's; genomes with fewer terms than others
            have zeros there.
        rank: of a term.
        device: where to.
    """
    num_terms = max((len(terms) for terms_G in terms_K_G for terms in terms_G), default=0)
    num_genomes = len(terms_K_G[0])
    places_E = [g for g in range(num_genomes) for _ in range(num_terms)]
    shifts_E = [t * rank for _ in range(num_genomes) for t in range(num_terms)]
    terms_K_E = [
        [terms[t : t + 1] for terms in terms_G for t in range(num_terms)] for terms_G in terms_K_G
    ]
    return _entries(terms_K_E, places_E, shifts_E, rank, device)


def dense_entries(
    terms_K_G: Sequence[Sequence[Sequence[Term]]], places_G: Sequence[int], device: torch.device
) -> Entries:
    """Genomes whose parameters are the centre's + Σ coefficient · ε(seed), at these places."""
    return _entries(terms_K_G, places_G, [0] * len(places_G), None, device)


def fill(
    jobs: Sequence[Job], entries: Entries, noise: NoiseKind = "gaussian", mask: Mask | None = None
) -> None:
    """Write all entries of all jobs; all that is not theirs stays as it is.

    One launch, if all tensors have one dtype.

    Raises:
        ValueError: A job has no room for the entries, or is on another device.
    """
    num_entries = len(entries.places_E)
    if not num_entries:
        return
    if num_entries > MAX_GRID:
        raise ValueError(f"at most {MAX_GRID} genomes' terms are written at once")
    for dtype in {job.out.dtype: None for job in jobs}:
        of_dtype = [job for job in jobs if job.out.dtype == dtype and job.part.num_elements]
        if of_dtype:
            _fill(of_dtype, entries, noise, mask)


def _fill(jobs: Sequence[Job], entries: Entries, noise: NoiseKind, mask: Mask | None) -> None:
    device = entries.places_E.device
    runs_J = [part_runs(job.part) for job in jobs]
    # All tiles are of one size, that of the job with the largest.
    blocks = max(cast("int", tiles_of(runs, noise)[2]["BLOCKS"]) for runs in runs_J)
    tiles_J: list[int] = []
    numbers_J: list[list[int]] = []
    settings: dict[str, object] = {}
    first_tile = 0
    for job, runs in zip(jobs, runs_J, strict=True):
        check_tensors(job.out, entries.places_E)
        job.check_room(entries)
        num_tiles, tiling, settings = tiles_of(runs, noise, blocks)
        centre = job.centre
        numbers_J.append(
            [
                *(job.out.data_ptr(), *job.out.stride()),
                *((0, 0, 0) if centre is None else (centre.data_ptr(), *centre.stride())),
                *(int(job.scaled), first_tile, key_of(job.name), *tiling),
                *(job.part.shape[1], job.kind, key_of(mask_name(job.name)) if mask else 0),
            ]
        )
        tiles_J.append(num_tiles)
        first_tile += num_tiles
    _, num_entries, num_terms = entries.seeds_K_E_S.shape
    launch(
        programs.slots_program,
        (first_tile, num_entries),
        torch.tensor(numbers_J, dtype=torch.int64).to(device),
        torch.from_numpy(np.repeat(np.arange(len(jobs)), tiles_J)).to(device),
        torch.tensor([job.factor for job in jobs], dtype=torch.float32).to(device),
        table(device),
        *entries[:4],
        num_entries,
        num_terms,
        *((mask.seed, mask.threshold) if mask else (0, 0)),
        SIZE=len(numbers_J[0]),
        DTYPE=programs.type_named(str(jobs[0].out.dtype).removeprefix("torch.")),
        DENSE=entries.rank is None,
        MASKED=mask is not None,
        **settings,
    )


def _entries(
    terms_K_E: Sequence[Sequence[Sequence[Term]]],
    places_E: Sequence[int],
    shifts_E: Sequence[int],
    rank: int | None,
    device: torch.device,
) -> Entries:
    num_terms = max((len(terms) for terms_E in terms_K_E for terms in terms_E), default=0)
    num_terms = max(1, num_terms)
    divisor = 1.0 if rank is None else math.sqrt(rank)
    nothing = Term(0, 0.0)
    padded_K_E_S = [
        [[*terms, *[nothing] * (num_terms - len(terms))] for terms in terms_E]
        for terms_E in terms_K_E
    ]
    shape = (len(terms_K_E), len(places_E), num_terms)
    flat = [term for padded_E_S in padded_K_E_S for padded_S in padded_E_S for term in padded_S]
    scales = np.array([term.coefficient for term in flat], np.float64) / divisor
    return Entries(
        torch.tensor(list(places_E), dtype=torch.int64, device=device),
        torch.tensor(list(shifts_E), dtype=torch.int64, device=device),
        torch.tensor([term.seed for term in flat], dtype=torch.int64).view(shape).to(device),
        torch.from_numpy(scales.astype(np.float32)).view(shape).to(device),
        rank,
        max(places_E, default=-1) + 1,
        max(shifts_E, default=0),
    )
