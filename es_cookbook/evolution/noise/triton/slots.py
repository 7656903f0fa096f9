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
        places: int64, where in the tensors.
        shifts: int64, by how many columns it is shifted.
        seeds: int64, (kinds of parameters, entries, terms); parameters of one kind have the same
            share of all terms.
        scales: float32, of these; a scale of 0 stands where there is no term.
        rank: of low-rank terms; None where the noise is dense.
        num_places: one more than the last place.
        most_shifted: columns before those of the last term.
    """

    places: torch.Tensor
    shifts: torch.Tensor
    seeds: torch.Tensor
    scales: torch.Tensor
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
    terms_of: Sequence[Sequence[Sequence[Term]]], rank: int, device: torch.device
) -> Entries:
    """Low-rank genomes at places 0, 1, ...; term t of each is shifted by t · rank columns.

    Args:
        terms_of: of each kind of parameter, each genome's; genomes with fewer terms than others
            have zeros there.
        rank: of a term.
        device: where to.
    """
    num_terms = max((len(terms) for of_kind in terms_of for terms in of_kind), default=0)
    num_genomes = len(terms_of[0])
    places = [g for g in range(num_genomes) for _ in range(num_terms)]
    shifts = [t * rank for _ in range(num_genomes) for t in range(num_terms)]
    one_by_one = [
        [terms[t : t + 1] for terms in of_kind for t in range(num_terms)] for of_kind in terms_of
    ]
    return _entries(one_by_one, places, shifts, rank, device)


def dense_entries(
    terms_of: Sequence[Sequence[Sequence[Term]]],
    places_G: Sequence[int],
    device: torch.device,
) -> Entries:
    """Genomes whose parameters are the centre's + Σ coefficient · ε(seed), at these places."""
    return _entries(terms_of, places_G, [0] * len(places_G), None, device)


def fill(
    jobs: Sequence[Job], entries: Entries, noise: NoiseKind = "gaussian", mask: Mask | None = None
) -> None:
    """Write all entries of all jobs; all that is not theirs stays as it is.

    One launch, if all tensors have one dtype.

    Raises:
        ValueError: A job has no room for the entries, or is on another device.
    """
    num_entries = len(entries.places)
    if not num_entries:
        return
    if num_entries > MAX_GRID:
        raise ValueError(f"at most {MAX_GRID} genomes' terms are written at once")
    for dtype in {job.out.dtype: None for job in jobs}:
        of_dtype = [job for job in jobs if job.out.dtype == dtype and job.part.num_elements]
        if of_dtype:
            _fill(of_dtype, entries, noise, mask)


def _fill(jobs: Sequence[Job], entries: Entries, noise: NoiseKind, mask: Mask | None) -> None:
    device = entries.places.device
    runs_of_jobs = [part_runs(job.part) for job in jobs]
    # All tiles are of one size, that of the job with the largest.
    blocks = max(cast("int", tiles_of(runs, noise)[2]["BLOCKS"]) for runs in runs_of_jobs)
    tiles: list[int] = []
    numbers: list[list[int]] = []
    settings: dict[str, object] = {}
    first_tile = 0
    for job, runs in zip(jobs, runs_of_jobs, strict=True):
        check_tensors(job.out, entries.places)
        job.check_room(entries)
        num_tiles, tiling, settings = tiles_of(runs, noise, blocks)
        centre = job.centre
        numbers.append(
            [
                *(job.out.data_ptr(), *job.out.stride()),
                *((0, 0, 0) if centre is None else (centre.data_ptr(), *centre.stride())),
                *(int(job.scaled), first_tile, key_of(job.name), *tiling),
                *(job.part.shape[1], job.kind, key_of(mask_name(job.name)) if mask else 0),
            ]
        )
        tiles.append(num_tiles)
        first_tile += num_tiles
    _, num_entries, num_terms = entries.seeds.shape
    launch(
        programs.slots_program,
        (first_tile, num_entries),
        torch.tensor(numbers, dtype=torch.int64).to(device),
        torch.from_numpy(np.repeat(np.arange(len(jobs)), tiles)).to(device),
        torch.tensor([job.factor for job in jobs], dtype=torch.float32).to(device),
        table(device),
        *entries[:4],
        num_entries,
        num_terms,
        *((mask.seed, mask.threshold) if mask else (0, 0)),
        SIZE=len(numbers[0]),
        DTYPE=programs.type_named(str(jobs[0].out.dtype).removeprefix("torch.")),
        DENSE=entries.rank is None,
        MASKED=mask is not None,
        **settings,
    )


def _entries(
    terms_of: Sequence[Sequence[Sequence[Term]]],
    places: Sequence[int],
    shifts: Sequence[int],
    rank: int | None,
    device: torch.device,
) -> Entries:
    """Of each kind of parameter, and of each entry, the terms; fewer than others' are filled up."""
    num_terms = max((len(terms) for of_kind in terms_of for terms in of_kind), default=0)
    num_terms = max(1, num_terms)
    shape = (len(terms_of), len(places), num_terms)
    nothing = Term(0, 0.0)
    flat = [
        term
        for of_kind in terms_of
        for terms in of_kind
        for term in (*terms, *[nothing] * (num_terms - len(terms)))
    ]
    divisor = 1.0 if rank is None else math.sqrt(rank)
    scales = np.array([term.coefficient for term in flat], np.float64) / divisor
    return Entries(
        torch.tensor(list(places), dtype=torch.int64, device=device),
        torch.tensor(list(shifts), dtype=torch.int64, device=device),
        torch.tensor([term.seed for term in flat], dtype=torch.int64).view(shape).to(device),
        torch.from_numpy(scales.astype(np.float32)).view(shape).to(device),
        rank,
        max(places, default=-1) + 1,
        max(shifts, default=0),
    )
