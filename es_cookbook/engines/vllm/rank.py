"""What one rank of a vLLM engine knows of genomes: the weights it samples with, made from seeds.

The centre is kept in float32, for the part of each parameter that the rank has. What vLLM samples
with is always derived from it, never undone. Dense genomes take the weights' place one at a time;
low-rank genomes are LoRA slots beside the centre's weights, written here from (seed, coefficient);
adapters are slots beside the base's weights, which nobody touches, so these may be quantised.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal, TypeAlias, TypeVar

import torch
from typing_extensions import override

from es_cookbook.checkpoints.models import AsStored
from es_cookbook.checkpoints.snapshots import restore_centre
from es_cookbook.common.errors import EngineError, ModelError
from es_cookbook.common.terminal import plural
from es_cookbook.engines.genome_terms import GenomeAdapters, GenomeTerms, Slots
from es_cookbook.engines.vllm.layout import Placement, find_placements, find_slots
from es_cookbook.evolution.centre import Centre, noise_device
from es_cookbook.evolution.genome import Genome, Step
from es_cookbook.evolution.noise.tensors import Part
from es_cookbook.evolution.spaces.base import ParameterInfo, SearchSpace
from es_cookbook.evolution.spaces.factors import AdapterFactors

FingerprintPiece: TypeAlias = Sequence[str | int]
"""Name, first and last row, first and last column, and what that part adds to the fingerprint."""
_T = TypeVar("_T", Placement, Slots)


class RankGenomes(ABC):
    """What every kind of space does alike: moving the centre, of the parts that the rank has."""

    def __init__(self, centre: Centre) -> None:
        self.centre = centre
        centre.fingerprint()

    @abstractmethod
    def load(self, genomes_G: Sequence[Genome]) -> None:
        """Make genomes resident, in place of any before.

        Raises:
            EngineError: They do not fit into the slots.
        """

    @abstractmethod
    def use(self, weights: int | Literal["centre", "base"]) -> None:
        """Write the centre's, the base's or a dense genome's weights into the model."""

    def apply(self, step: Step) -> list[FingerprintPiece]:
        """Move the centre; no genome is resident afterwards."""
        self.centre.apply(step)
        return self._moved()

    def restore(self, steps: Sequence[Step], snapshot: Path | None) -> list[FingerprintPiece]:
        """Set the centre to the base moved by these steps; no genome is resident afterwards.

        Of a snapshot that is on the way the rank reads its own parts, and goes on from there.
        """
        restore_centre(self.centre, steps, snapshot)
        return self._moved()

    def fingerprint(self) -> list[FingerprintPiece]:
        """What this rank's parts add to the centre's fingerprint."""
        return [
            (name, *part.rows, *part.columns, self.centre.fingerprints[name])
            for name, part in self.centre.parts.items()
        ]

    def _moved(self) -> list[FingerprintPiece]:
        self.load([])
        self.use("centre")
        return self.fingerprint()


class DenseGenomes(RankGenomes):
    """Genomes whose weights take the place of the model's, one at a time."""

    def __init__(
        self,
        model: torch.nn.Module,
        space: SearchSpace,
        infos: Sequence[ParameterInfo],
        as_stored: AsStored,
    ) -> None:
        found = find_placements(model, infos, space.shapes.keys(), as_stored)
        self._placements = _find(found, space.shapes, "parameter")
        self._base: dict[str, torch.Tensor] = {}
        for name, place in self._placements.items():
            shape = space.shapes[name]
            is_whole = place.part == Part.whole(shape)
            self._base[name] = place.read().view(shape) if is_whole else place.read()
        parts = {name: place.part for name, place in self._placements.items()}
        centre = Centre(self._base, space, torch.get_num_threads(), parts, _noise_device(model))
        super().__init__(centre)
        self._genomes_G: Sequence[Genome] = ()

    @override
    def load(self, genomes_G: Sequence[Genome]) -> None:
        """Their weights are made when they are used."""
        self._genomes_G = genomes_G

    @override
    def use(self, weights: int | Literal["centre", "base"]) -> None:
        for name, place in self._placements.items():
            if weights == "base":
                place.write(self._base[name])
            elif weights == "centre":
                place.write(self.centre.weights[name])
            else:
                place.write(self.centre.perturbed(self._genomes_G[weights], name))


class LowRankGenomes(DenseGenomes):
    """Genomes in LoRA slots beside the centre's weights; the last slot stays zero."""

    def __init__(
        self,
        model: torch.nn.Module,
        space: SearchSpace,
        infos: Sequence[ParameterInfo],
        as_stored: AsStored,
    ) -> None:
        super().__init__(model, space, infos, as_stored)
        self._space = space
        self._slots = _slots_for(model, space.shapes)
        self._transposed = {info.name for info in infos if info.transposed}
        self._device = _noise_device(model)

    @override
    def load(self, genomes_G: Sequence[Genome]) -> None:
        terms = GenomeTerms(genomes_G, self._space, self._device)
        _check_room(self._slots, terms.num_genomes, 1, terms.num_ranks)
        for name, slots in self._slots.items():
            slots.a.zero_()
            slots.b.zero_()
            terms.write(slots.mT if name in self._transposed else slots)
        terms.finish()


class AdapterGenomes(RankGenomes):
    """Adapters in LoRA slots beside the base's weights; the last two: the centre's, and none's."""

    def __init__(self, model: torch.nn.Module, space: SearchSpace, adapter: AdapterFactors) -> None:
        self._device = _noise_device(model)
        centre = Centre({}, space, torch.get_num_threads(), device=self._device)
        super().__init__(centre)
        self._space, self._adapter = space, adapter
        self._slots = _slots_for(model, adapter.targets)

    @override
    def load(self, genomes_G: Sequence[Genome]) -> None:
        """The centre's slot is written too."""
        _check_room(self._slots, len(genomes_G), 2, self._adapter.lora.rank)
        num_slots = next(iter(self._slots.values())).a.shape[0]
        factors = GenomeAdapters(
            [*genomes_G, Genome()],
            [*range(len(genomes_G)), num_slots - 2],
            self._space,
            self._adapter,
            self.centre,
            self._device,
        )
        for slots in self._slots.values():
            factors.write(slots)
        factors.finish()

    @override
    def use(self, weights: int | Literal["centre", "base"]) -> None:
        """Every target has a slot; there is nothing to write."""


def host_genomes(
    model: torch.nn.Module,
    space: SearchSpace,
    infos: Sequence[ParameterInfo],
    as_stored: AsStored,
) -> RankGenomes:
    """Get ready to host a space's genomes on vLLM's model, with LoRA slots if it needs them.

    Raises:
        ModelError: The model has no such parameter, or no slot for it.
    """
    if space.adapter is not None:
        return AdapterGenomes(model, space, space.adapter)
    if space.low_rank is not None:
        return LowRankGenomes(model, space, infos, as_stored)
    return DenseGenomes(model, space, infos, as_stored)


def _noise_device(model: torch.nn.Module) -> torch.device:
    return noise_device(next(model.parameters()).device)


def _find(found: Mapping[str, _T], wanted: Iterable[str], what: str) -> dict[str, _T]:
    missing = [name for name in wanted if name not in found]
    if missing:
        more = f" and for {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ModelError(
            f"vLLM has no {what} for {missing[0]}{more}; leave them out (search_space.exclude), or "
            "use engine=torch"
        )
    return {name: found[name] for name in wanted}


def _slots_for(model: torch.nn.Module, names: Iterable[str]) -> dict[str, Slots]:
    return _find({slots.name: slots for slots in find_slots(model)}, names, "LoRA slot")


def _check_room(slots: Mapping[str, Slots], num_genomes: int, reserved: int, rank: int) -> None:
    num_slots, slot_rank = next(iter(slots.values())).a.shape[:2]
    if num_genomes > num_slots - reserved or rank > slot_rank:
        raise EngineError(
            f"no room for {plural(num_genomes, 'genome')} of rank {rank}: the engine has "
            f"{plural(num_slots - reserved, 'slot')} of rank {slot_rank} "
            "(engine.max_genomes, engine.terms_per_genome)"
        )


def merge_fingerprints(
    pieces_of_ranks: Sequence[Sequence[FingerprintPiece]], shapes: Mapping[str, tuple[int, ...]]
) -> int:
    """The centre's fingerprint: the sum over its parts, those that several ranks have once.

    Raises:
        EngineError: Ranks disagree about a part, or have not all of a parameter between them.
    """
    values: dict[tuple[str | int, ...], int] = {}
    for pieces in pieces_of_ranks:
        for *place, value in pieces:
            if values.setdefault(tuple(place), int(value)) != value:
                raise EngineError(
                    f"vLLM's ranks disagree about {place[0]}: the engine must be restored"
                )
    covered: dict[str, int] = {}
    for name, row, end_row, column, end_column in values:
        area = (int(end_row) - int(row)) * (int(end_column) - int(column))
        covered[str(name)] = covered.get(str(name), 0) + area
    for name, shape in shapes.items():
        if covered.get(name) != math.prod(shape):
            raise EngineError(
                f"vLLM's ranks have {covered.get(name, 0)} elements of {name} between them, and it "
                f"has {math.prod(shape)}"
            )
    return sum(values.values()) % 2**64
