"""The weights that a torch engine holds: the base, the centre and the resident genomes.

The base is never written. The centre lives twice: in float32, where steps move it exactly, and in
the dtype that samples, always derived from the former. Low-rank genomes are tables beside the
centre's weights; dense genomes are models of their own, sharing the large tables that the search
space leaves alone.
"""

import copy
import os
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from es_cookbook.engines.base import Target
from es_cookbook.engines.low_rank_tables import bytes_of_genome, fill_tables
from es_cookbook.engines.population_layers import PopulationModel
from es_cookbook.errors import EngineError, RequestError
from es_cookbook.evolution.centre import Centre
from es_cookbook.evolution.genome import Genome
from es_cookbook.evolution.spaces.base import SearchSpace
from es_cookbook.evolution.spaces.low_rank import LowRankSpace


class ResidentWeights:
    """See the module's text. None of it may change while requests are in flight.

    Args:
        base: the model as loaded; kept, never written.
        space: what genomes perturb.
        device: where the base is.
        memory_bytes: for resident genomes.
        num_threads: that make genomes.

    Attributes:
        centre: float32 parameters of the search space.
        model: the centre's weights as they sample, and the low-rank genomes' tables.
    """

    def __init__(
        self,
        base: PreTrainedModel,
        space: SearchSpace,
        device: torch.device,
        memory_bytes: int,
        num_threads: int,
    ) -> None:
        self._base = base
        self._space = space
        self._device = device
        self._memory_bytes = memory_bytes
        self._num_threads = num_threads
        parameters = dict(base.named_parameters())
        self.centre = Centre(
            {name: parameters[name].detach().cpu() for name in space.shapes}, space
        )
        self.model = self._new_model()
        self._base_model: PopulationModel | None = None
        self._genome_models: list[PopulationModel] = []
        self._num_loaded = 0

    @property
    def capacity(self) -> int:
        """How many genomes fit into the memory for them, at least one."""
        if isinstance(self._space, LowRankSpace):
            return max(1, self._memory_bytes // bytes_of_genome(self.model, self._space))
        selected = self._selected(self.model.module).values()
        return max(1, self._memory_bytes // sum(p.numel() * p.element_size() for p in selected))

    def answering(self, target: Target) -> tuple[PopulationModel, int]:
        """The model that answers for a target, and its row of the low-rank tables.

        Raises:
            RequestError: No such genome is resident.
        """
        if target == "base":
            if self._base_model is None:
                self._base_model = PopulationModel(copy.deepcopy(self._base))
            return self._base_model, 0
        if target == "centre":
            return self.model, self._num_loaded
        if not 0 <= target < self._num_loaded:
            raise RequestError(f"there is no genome {target}: {self._num_loaded} are loaded")
        dense = not isinstance(self._space, LowRankSpace)
        return (self._genome_models[target], 0) if dense else (self.model, target)

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
        if isinstance(self._space, LowRankSpace):
            self.model.tables = fill_tables(
                self.model, self._space, genomes_G, self._device, self._num_threads
            )
        else:
            while len(self._genome_models) < len(genomes_G):
                self._genome_models.append(self._new_model())
            with ThreadPoolExecutor(self._num_threads) as pool:
                list(pool.map(self._write_genome, self._genome_models, genomes_G))
        self._num_loaded = len(genomes_G)

    def move(self, move_centre: Callable[[Centre], int]) -> int:
        """Move the centre and give its fingerprint; genomes of the old one are resident no more."""
        fingerprint = move_centre(self.centre)
        self.model.tables = None
        self._num_loaded = 0
        self._write_centre(self.model.module)
        return fingerprint

    def save(self, path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
        """Write the centre as a Hugging Face model directory: beside, to the disk, then renamed.

        Raises:
            EngineError: The path exists.
        """
        if path.exists():
            raise EngineError(f"cannot save the centre: {str(path)!r} exists already")
        module = copy.deepcopy(self._base)
        self._write_centre(module)
        beside = path.with_name(f".{path.name}.partial")
        shutil.rmtree(beside, ignore_errors=True)
        try:
            module.save_pretrained(beside)
            tokenizer.save_pretrained(beside)
            for file in (*beside.iterdir(), beside):
                descriptor = os.open(file, os.O_RDONLY)
                os.fsync(descriptor)
                os.close(descriptor)
            os.rename(beside, path)
        finally:
            shutil.rmtree(beside, ignore_errors=True)

    def _new_model(self) -> PopulationModel:
        """A copy of the base with weights of its own, except tables that genomes leave alone."""
        linear = {
            id(parameter)
            for module in self._base.modules()
            if isinstance(module, torch.nn.Linear)
            for parameter in module.parameters()
        }
        shared = {
            id(parameter): parameter
            for name, parameter in self._base.named_parameters()
            if name not in self._space.shapes and id(parameter) not in linear
        }
        return PopulationModel(copy.deepcopy(self._base, shared))

    def _selected(self, module: PreTrainedModel) -> dict[str, torch.nn.Parameter]:
        return {n: p for n, p in module.named_parameters() if n in self._space.shapes}

    def _write_centre(self, module: PreTrainedModel) -> None:
        with torch.inference_mode():
            for name, parameter in self._selected(module).items():
                parameter.copy_(self.centre.weights[name])

    def _write_genome(self, model: PopulationModel, genome: Genome) -> None:
        with torch.inference_mode():
            for name, parameter in self._selected(model.module).items():
                parameter.copy_(self.centre.perturbed(genome, name))
