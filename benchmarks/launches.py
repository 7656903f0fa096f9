"""How many operations the host starts for a token of a batch, without graphs and with them.

    python -m benchmarks.launches
    python -m benchmarks.launches layers=12 genomes=16

Counted are operations of PyTorch that launch something on a GPU, by the code that runs there, on
the CPU: views and allocations are left out, and repeating a captured step counts as one. Uploads
are counted with graphs; without them they are not, so the usual path starts a few more. The model
has random weights, and the layers and heads of SmolLM2-135M at a fraction of their width.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import chz
import numpy as np
import pytest
import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.harness import Row, mirrored_pairs, report, row
from es_cookbook.checkpoints.linear_weights import named_weights
from es_cookbook.checkpoints.models import parameter_infos
from es_cookbook.common.cli import run_cli
from es_cookbook.engines.base import SampleRequest
from es_cookbook.engines.torch.flat import FlatForward, new_cache
from es_cookbook.engines.torch.gpu.graphs import CapturedForward, Step
from es_cookbook.engines.torch.kernels import modules
from es_cookbook.engines.torch.population_layers import PopulationModel
from es_cookbook.engines.torch.prefix_cache import PrefixCache
from es_cookbook.engines.torch.resident_weights import GenomeTables
from es_cookbook.engines.torch.slots import Forward, SlotTable, Work
from es_cookbook.evolution.centre import Centre
from es_cookbook.evolution.spaces.low_rank import LowRank
from es_cookbook.rl.types import Observation, SamplingParams

VOCABULARY, PROMPT, TOKENS = 512, 24, 16


@chz.chz
class Config:
    """Sizes of the batch and of the model."""

    genomes: int = chz.field(default=8, doc="genomes, of a mirrored population")
    attempts: int = chz.field(default=8, doc="requests of each, a multiple of 8")
    layers: int = chz.field(default=30, doc="layers of the model")


def tensors(found: object) -> list[torch.Tensor]:
    """Return the tensors of an operation's arguments or result."""
    several = found if isinstance(found, list | tuple) else [found]
    return [each for each in several if isinstance(each, torch.Tensor)]


def made_by(func: OpOverload, args: Sequence[Any], found: object) -> list[torch.Tensor]:
    """Return the tensors that an operation made: none if it gives views or memory alone."""
    read = {each.untyped_storage().data_ptr() for each in tensors(args)}
    made = [each for each in tensors(found) if each.untyped_storage().data_ptr() not in read]
    return [] if "empty" in str(func) else made


def is_in_place(func: OpOverload) -> bool:
    """Return whether an operation writes to its arguments."""
    return func.__name__.partition(".")[0].endswith("_")


class Counter(TorchDispatchMode):
    """Counts operations that would launch something on a GPU.

    Attributes:
        number: operations so far, and `captured`, those of one captured step.
    """

    def __init__(self) -> None:
        super().__init__()
        self.number = self.captured = 0
        self._inside = False

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: object,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        found = func(*args, **(kwargs or {}))
        if made_by(func, args, found) or is_in_place(func):
            self.captured += self._inside
            self.number += not self._inside
        return found

    def capture(self, step: Step) -> Step:
        """Return a step that counts as one operation."""

        def repeat() -> None:
            self.number, self.captured, self._inside = self.number + 1, 0, True
            step()
            self._inside = False

        return repeat


def host(config: Config) -> PopulationModel:
    """Return a model with the low-rank parts of a population."""
    shape = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=36,
        intermediate_size=96,
        num_hidden_layers=config.layers,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    module = LlamaForCausalLM(shape)
    space = LowRank()(parameter_infos(module))
    weights = {name: each for name, each in named_weights(module) if name in space.shapes}
    centre = Centre(weights, space)
    model = PopulationModel(module)
    model.tables = GenomeTables(model, space, centre, 1).fill(mirrored_pairs(config.genomes))
    return model


def works(config: Config, model: PopulationModel, temperature: float, seed: int) -> list[Work]:
    rng = np.random.default_rng(seed)
    params = SamplingParams(max_tokens=TOKENS, temperature=temperature)
    requests = [
        SampleRequest(g, Observation(tuple(rng.integers(VOCABULARY, size=PROMPT).tolist())), params)
        for g in range(config.genomes)
        for _ in range(config.attempts)
    ]
    return [Work(request, model, request.target, TOKENS) for request in requests]


@dataclasses.dataclass(frozen=True)
class Counts:
    """Operations of a generation's prompts, of a token of the whole batch, and of one step."""

    prompts: int
    token: float
    step: int


def counts(config: Config, model: PopulationModel, temperature: float, *, captures: bool) -> Counts:
    """Run the population until all its sizes are captured, and count a generation."""
    counter, device = Counter(), torch.device("cpu")
    cache = new_cache(device, 1 + config.genomes * config.attempts * 4, torch.float32)
    flat = device, 4096, cache, PrefixCache(cache, 0)
    ends = np.array([VOCABULARY])
    runs: Forward = FlatForward(*flat)
    if captures:
        runs = CapturedForward(*flat, None, ends, lambda: counter.capture)
    length = PROMPT + TOKENS
    slots = config.genomes * config.attempts
    for seed in range(3):
        state = SlotTable(slots, length)
        runs.fit(slots, length)
        runs.turn_to(model)
        admitted = runs.admit(works(config, model, temperature, seed))
        placed = list(zip(admitted, state.place(admitted), strict=True))
        counter.number, generated = 0, 1
        with counter:
            for slots_, tokens, _ in runs.first_tokens(state, placed):
                state.accept(slots_, tokens, None)
            prompts, counter.number = counter.number, 0
            while generated < TOKENS:
                for slots_, tokens, _ in runs.next_tokens(state):
                    state.accept(slots_, tokens, None)
                    generated += 1
        runs.rest()
    return Counts(prompts, counter.number / (TOKENS - 1), counter.captured)


def measure(config: Config) -> list[Row]:
    """Count both paths, greedy and at temperature 1."""
    rows: list[Row] = []
    with pytest.MonkeyPatch.context() as patch, torch.inference_mode():
        patch.setattr(modules, "KERNEL_DEVICES", frozenset())  # all runs as on a GPU
        model = host(config)
        for name, temperature in (("greedy", 0.0), ("temperature 1", 1.0)):
            usual = counts(config, model, temperature, captures=False)
            graphs = counts(config, model, temperature, captures=True)
            rows += [
                row(f"{name}: operations a token of the batch", [usual.token], ""),
                row(f"{name}: with graphs", [graphs.token], ""),
                row(f"{name}: in a captured step", [graphs.step], ""),
                row(
                    f"{name}: with graphs / without", [graphs.token / usual.token], "", at_most=0.05
                ),
                row(f"{name}: operations of a generation's prompts", [usual.prompts], ""),
                row(f"{name}: with graphs, prompts", [graphs.prompts], ""),
            ]
    return rows


def main(config: Config) -> None:
    report("launches", measure(config))


if __name__ == "__main__":
    run_cli(main, Config)
