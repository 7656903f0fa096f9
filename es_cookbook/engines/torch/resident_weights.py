"""The weights that a torch engine holds: the base, the centre and the resident genomes.

The base is never written. The centre lives twice: in float32, where steps move it exactly, and in
the dtype that samples, always derived from the former. Low-rank genomes and adapters are tables
beside the model's weights; dense genomes are separate models, sharing the large tables that the
search space leaves alone. For a quantised layer the centre has the parameters that move, and a
model the weight that they make.
"""

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, cast

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from es_cookbook.checkpoints.linear_weights import named_weights, split_member
from es_cookbook.checkpoints.models import save_model
from es_cookbook.checkpoints.quantised import (
    QuantisedWeight,
    parameter_name,
    quantised_checkpoint,
    quantised_layers,
)
from es_cookbook.checkpoints.tensors import leave_in_files, restore_centre
from es_cookbook.common.errors import EngineError, RequestError
from es_cookbook.engines.base import Target
from es_cookbook.engines.genome_terms import GenomeFactors, Slots
from es_cookbook.engines.torch.kernels.experts import ExpertGroup
from es_cookbook.engines.torch.kernels.low_rank import LowRankTable
from es_cookbook.engines.torch.kernels.modules import Path as RowPath
from es_cookbook.engines.torch.kernels.modules import has_kernels
from es_cookbook.engines.torch.kernels.products import packs
from es_cookbook.engines.torch.kernels.vectors import VectorTable, host_vectors
from es_cookbook.engines.torch.memory import trim
from es_cookbook.engines.torch.population_layers import LinearGroup, PopulationModel, factors_of
from es_cookbook.evolution.centre import Centre, for_each, noise_device, on_gpu
from es_cookbook.evolution.genome import Genome, Step
from es_cookbook.evolution.spaces.base import SearchSpace


class ResidentWeights:
    """The base, the centre and the genomes. Nothing may change while requests are in flight.

    Args:
        base: the model as loaded; kept, never written.
        num_threads: threads that make genomes and move the centre, if on the CPU.
        path: path on which batches run.

    Attributes:
        space: parameters of `base` that genomes perturb.
        vocabulary_size: rows of the model's embedding.
        memory_bytes: bytes for resident genomes; there is room for one in any case.
        centre: float32 parameters of the search space.
        model: the centre's weights as they sample (an adapter's centre: the base's), and tables.
    """

    def __init__(
        self, base: PreTrainedModel, space: SearchSpace, num_threads: int, path: RowPath
    ) -> None:
        self.base = base
        self._path = path
        self.space = space
        embedding = cast("torch.nn.Embedding", base.get_input_embeddings())
        self.vocabulary_size = embedding.num_embeddings
        self.memory_bytes = 0
        device = noise_device(base.device)
        self._num_threads = 1 if on_gpu(device) else num_threads
        self._quantised = _moving_layers(base, space)
        selected = {
            name: parameter.detach().to(device)
            for name, parameter in named_weights(base)
            if name in space.reads
        }
        for weight, names in self._quantised.values():
            parts = weight.parameters()
            selected |= {name: parts[kind].to(device) for kind, name in names.items()}
        self.centre = Centre(selected, space, self._num_threads, device=device)
        self.model = self._new_model()
        self._dtypes = {name: parameter.dtype for name, parameter in named_weights(base)}
        self._products = path.products or base.dtype
        narrow = self._products == torch.int8 or (self._products == torch.bfloat16 and packs())
        self._packs = narrow and base.device.type == "cpu" and not space.is_dense
        if self._packs:
            self.model.pack()
            trim()
        self._tables = None
        if space.vectors is not None:
            self._tables = _VectorTables(self.model, space, self.centre)
        elif not space.is_dense:
            self._tables = GenomeTables(self.model, space, self.centre, self._num_threads)
        self._base_model: PopulationModel | None = None
        self._genome_models: list[PopulationModel] = []
        self._num_loaded = 0
        self._released: list[tuple[torch.UntypedStorage, int]] = []
        self._host([])
        leave_in_files(base.parameters())

    @property
    def capacity(self) -> int:
        """Number of genomes that fit into their memory, at least one."""
        own = (parameter.nbytes for _, parameter in self._own(self.model.module))
        of_genome = self._tables.bytes_of_genome() if self._tables else sum(own)
        return max(1, self.memory_bytes // of_genome)

    def answering(self, target: Target) -> tuple[PopulationModel, int]:
        """Return the model that answers for a target, and its row of the low-rank tables.

        Raises:
            RequestError: No such genome is resident.
        """
        if target == "base" and (self.space.adapter or self.space.vectors) is not None:
            return self.model, self._num_loaded + 1
        if target == "base":
            if self._base_model is None:
                self._base_model = PopulationModel(copy.deepcopy(self.base), self._path)
                if self._products == torch.int8:  # the centre differs from it by steps alone
                    self._base_model.pack()
            return self._base_model, 0
        if target == "centre":
            return self.model, self._num_loaded
        if not 0 <= target < self._num_loaded:
            raise RequestError(f"there is no genome {target}: {self._num_loaded} are loaded")
        return (self.model, target) if self._tables else (self._genome_models[target], 0)

    def virtual_tokens(self, target: Target) -> tuple[int, ...]:
        """Return the virtual tokens that come before a target's prompts."""
        number = 0 if target == "base" else self.space.num_virtual
        return tuple(range(self.vocabulary_size, self.vocabulary_size + number))

    def load(self, genomes_G: Sequence[Genome]) -> None:
        """Make these genomes resident, in place of any before.

        Raises:
            EngineError: They do not fit.
        """
        if len(genomes_G) > self.capacity:
            raise EngineError(
                f"{len(genomes_G)} genomes do not fit: engine.memory_gib holds {self.capacity} of "
                "this search space"
            )
        if self._tables is None:
            while len(self._genome_models) < len(genomes_G):
                self._genome_models.append(self._new_model())
            values_G = [partial(self.centre.perturbed, genome) for genome in genomes_G]
            pairs = zip(self._genome_models, values_G, strict=False)
            for_each(lambda pair: self._write(*pair), pairs, self._num_threads)
        self._host(genomes_G)

    def apply(self, step: Step) -> int:
        """Move the centre by a step. Returns its fingerprint; no genome is resident afterwards."""
        return self._moved(self.centre.apply(step))

    def restore(self, steps: Sequence[Step], snapshot: Path | None) -> int:
        """Set the centre to the base moved by these steps; otherwise like `apply`."""
        while self._released:
            storage, size = self._released.pop()
            storage.resize_(size)
        fingerprint = self._moved(restore_centre(self.centre, steps, snapshot))
        leave_in_files(self.base.parameters())
        return fingerprint

    def release(self) -> None:
        """Give back the memory of the centre, and of genomes: nothing but `restore` may follow."""
        self.centre.release()
        self._genome_models.clear()
        self.model.tables = None
        if self._tables is not None:
            self._tables.kept.clear()
        held: dict[int, tuple[torch.UntypedStorage, int]] = {}
        for _, parameter in self._own(self.model.module):
            storage = parameter.untyped_storage()  # several layers that run as one are in one
            own = held.get(storage.data_ptr(), (storage, 0))[1]
            held[storage.data_ptr()] = storage, own + parameter.nbytes
        # Memory shared with unchanged weights is kept.
        for storage, own in held.values():
            if storage.resizable() and storage.nbytes() == own:
                self._released.append((storage, own))
                storage.resize_(0)

    def save(self, path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
        """Write the centre as a Hugging Face model directory, whole or not at all.

        Raises:
            EngineError: The path exists.
        """
        if self._quantised:
            checkpoint = quantised_checkpoint(str(self.base.name_or_path))
            assert checkpoint is not None, "its layers were loaded from one"
            save_model(
                partial(checkpoint.write, moved=self.centre.weights.items()), tokenizer, path
            )
            return
        module = copy.deepcopy(self.base)
        self.space.merge_(dict(named_weights(module)), self.centre.weights)
        save_model(module.save_pretrained, tokenizer, path)

    def _moved(self, fingerprint: int) -> int:
        value = self.centre.weights.__getitem__
        own = {name for name, _ in self._own(self.model.module)}
        self.model.unpack(own)
        self._write(self.model, value)
        if self._packs:
            self.model.pack(own)
            trim()
        self._host([])
        return fingerprint

    def _host(self, genomes_G: Sequence[Genome]) -> None:
        if self._tables is not None:
            self.model.tables = self._tables.fill(genomes_G)
        self._num_loaded = len(genomes_G)

    def _new_model(self) -> PopulationModel:
        """Copy the base, with separate weights except tables that genomes leave alone."""
        linear = {
            id(parameter)
            for module in self.base.modules()
            if isinstance(module, torch.nn.Linear)
            for parameter in module.parameters()
        }
        embedding = cast("torch.nn.Embedding", self.base.get_input_embeddings())
        linear.discard(id(embedding.weight))  # of a tied head, which is multiplied as it lies
        perturbed = {split_member(name)[0] for name in self.space.shapes}
        shared = {
            id(parameter): parameter
            for name, parameter in self.base.named_parameters()
            if name not in perturbed and id(parameter) not in linear
        }
        return PopulationModel(copy.deepcopy(self.base, shared), self._path)

    def _own(self, module: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the parameters that differ between genomes: selected, or made of selected ones."""
        for name, parameter in named_weights(module):
            if name in self.space.shapes or name in self._quantised:
                yield name, parameter

    def _write(self, model: PopulationModel, value: Callable[[str], torch.Tensor]) -> None:
        with torch.inference_mode():
            for name, parameter in self._own(model.module):
                if name not in self._quantised:
                    # Rounded as the base is, also where a model holds it in float32 (see `widen`).
                    parameter.copy_(value(name).to(self._dtypes[name]))
                    continue
                weight, names = self._quantised[name]
                values = {kind: value(part).to(parameter.device) for kind, part in names.items()}
                parameter.copy_(weight.moved(values).dequantised())


def _moving_layers(
    model: PreTrainedModel, space: SearchSpace
) -> dict[str, tuple[QuantisedWeight, Mapping[str, str]]]:
    """Return the quantised weights that the space moves: name -> weight, and names of its parts."""
    found: dict[str, tuple[QuantisedWeight, Mapping[str, str]]] = {}
    for layer, weight in quantised_layers(model):
        moving = {
            kind: name
            for kind in weight.parameters()
            if (name := parameter_name(layer, kind)) in space.shapes
        }
        if moving:
            found[f"{layer}.weight"] = (weight, moving)
    return found


_REGISTER = 4
"""Numbers of a shortest vector register: what begins at a multiple of it is aligned."""

Tables: TypeAlias = list[LowRankTable | VectorTable | None]
"""One per linear group; None for a group that the space leaves out. Those of vectors come after."""


_Kept: TypeAlias = dict[object, torch.Tensor]
"""Tables of the genomes before, where graphs read those of the next ones."""


def _zeros(
    kept: _Kept, key: object, shape: Sequence[int], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Return zeros, on a GPU in the memory of the last ones of this key if these had the shape."""
    if has_kernels(device):
        return torch.zeros(*shape, dtype=dtype, device=device)
    if key not in kept or kept[key].shape != torch.Size(shape):
        kept[key] = torch.empty(*shape, dtype=dtype, device=device)
    return kept[key].zero_()


class _VectorTables:
    """Makes the tables of a block of genomes that are vectors."""

    def __init__(self, model: PopulationModel, space: SearchSpace, centre: Centre) -> None:
        self._space, self._centre, self._device = space, centre, model.module.device
        self.kept: _Kept = {}
        self._groups: Tables = [None] * len(model.groups)
        host_vectors(model.module, space, len(model.groups), cast(Any, factors_of))

    def fill(self, genomes_G: Sequence[Genome]) -> Tables:
        """Make tables of these genomes, the centre and the base, which is 0."""
        tables = list(self._groups)
        for name in self._space.shapes:
            own_G = [self._centre.perturbed(genome, name) for genome in (*genomes_G, Genome())]
            vectors_G = torch.stack([*own_G, torch.zeros_like(own_G[0])]).to(self._device)
            vectors_G = vectors_G.view(len(vectors_G), -1, vectors_G.shape[-1])
            held = _zeros(self.kept, name, vectors_G.shape, vectors_G.dtype, self._device)
            tables.append(VectorTable(held.copy_(vectors_G)))
        return tables

    def bytes_of_genome(self) -> int:
        """Return the bytes of a genome's rows."""
        return sum(weight.nbytes for weight in self._centre.weights.values())


class GenomeTables:
    """Makes the tables of a block of genomes.

    Args:
        model: hosts them.
        space: a low-rank one, or one of adapters.
    """

    def __init__(
        self, model: PopulationModel, space: SearchSpace, centre: Centre, num_threads: int
    ) -> None:
        self._space = space
        self._centre = centre
        self.kept: _Kept = {}
        rank = space.rank if space.adapter is None else space.adapter.lora.rank
        assert rank is not None, "dense genomes need models of their own"
        self._rank = rank
        self._num_threads = num_threads
        self._device = noise_device(model.groups[0].weight.device)
        self._num_groups = len(model.groups)
        members: dict[int, list[tuple[str, int]]] = {}
        for name, group, start in model.group_members():
            if name in space.weights:
                members.setdefault(group.index, []).append((name, start))
        self._groups = [(model.groups[index], of_group) for index, of_group in members.items()]

    def fill(self, genomes_G: Sequence[Genome]) -> Tables | None:
        """Make the tables of these genomes, or None where all of them would be zero."""
        if self._space.adapter is not None:
            genomes_G = [*genomes_G, Genome()]
        factors = GenomeFactors(genomes_G, self._space, self._device, self._centre)
        return self._fill(factors) if factors.num_ranks else None

    def bytes_of_genome(self) -> int:
        """Return the bytes of a genome's row (a low-rank one: with one term), over all tables."""
        return sum(
            elements_of_row(group, self._rank, len(members)) * group.dtype.itemsize
            for group, members in self._groups
        )

    def _fill(self, factors: GenomeFactors) -> Tables:
        """Make tables of zeros, one row more than there are genomes, and write the factors."""
        tables: Tables = [None] * self._num_groups
        num_rows, rank = factors.num_genomes + 1, factors.num_ranks

        def write(
            name: str, transposed: bool, a_G_R_N: torch.Tensor, b_G_N_R: torch.Tensor
        ) -> None:
            slots = Slots(name, b_G_N_R.mT, a_G_R_N.mT)
            # A stored (in, out) weight's rows are inputs; an adapter's A reads them in any case.
            factors.write(slots.mT if transposed and self._space.adapter is None else slots)

        def fill(perturbed: tuple[LinearGroup | ExpertGroup, list[tuple[str, int]]]) -> None:
            group, members = perturbed
            a_sizes, b_sizes = _row_shapes(group, rank, len(members))
            dtype, device = group.dtype, self._device
            a_G = _zeros(self.kept, (group, "A"), (num_rows, *a_sizes), dtype, device)
            b_G = _zeros(self.kept, (group, "B"), (num_rows, *b_sizes), dtype, device).mT
            columns_R: list[tuple[int, int]] = []
            for m, (name, place) in enumerate(members):
                if isinstance(group, ExpertGroup):
                    write(name, group.transposed, a_G[:, place], b_G[:, place])
                    continue
                columns = slice(m * rank, (m + 1) * rank)
                size = group.sizes[group.offsets.index(place)]
                columns_R += [(place, place + size)] * rank
                a_G_R_N = a_G[:, columns, place : place + size]
                write(name, group.transposed, a_G_R_N, b_G[:, :, columns])
            where = np.array(columns_R, dtype=np.int64).reshape(-1, 2)
            a_G, b_G = (each.to(group.weight.device, group.dtype) for each in (a_G, b_G))
            tables[group.index] = LowRankTable(a_G, b_G, where)

        for_each(fill, self._groups, self._num_threads)
        factors.finish()
        return tables


def elements_of_row(group: LinearGroup | ExpertGroup, rank: int, num_members: int) -> int:
    """Return the elements of a genome's factors for `num_members` perturbed layers of a group."""
    return sum(map(math.prod, _row_shapes(group, rank, num_members)))


def _row_shapes(
    group: LinearGroup | ExpertGroup, rank: int, num_members: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shapes of one genome's A and B in memory; see `LowRankTable`."""
    if isinstance(group, ExpertGroup):
        experts, outs, ins = group.weight.shape
        return (experts, rank, outs), (experts, rank, ins)
    ranks = _padded(rank * num_members)
    return (ranks, _padded(sum(group.sizes))), (ranks, group.in_features)


def _padded(size: int) -> int:
    """Return the padded number of ranks or outputs, so that bits depend on no position.

    Sizes that no kernel of the BLAS cuts into registers stay as they are.
    """
    return size if size <= _REGISTER else -(-size // _REGISTER) * _REGISTER
