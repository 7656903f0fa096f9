"""An engine that answers with weights which are trained elsewhere in this process.

It gets them as a snapshot, a file that every engine can begin at (`Engine.restore`): so rollouts,
Envs, time-outs, evaluations and their sampling seeds are those of evolution strategies, and vLLM
samples where it is chosen. That costs a write and a read of these weights each time, in a temporary
directory, and the fingerprint tells whether the engine has them.
"""

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

from es_cookbook.checkpoints.snapshots import metadata
from es_cookbook.common.errors import EngineError
from es_cookbook.engines.base import Engine
from es_cookbook.evolution.exact import MODULUS, fingerprint_span
from es_cookbook.population.sampler import PopulationSampler


class Sampled:
    """An engine, and a sampler that runs rollouts of its centre.

    Args:
        weights: those of the engine's search space, all of them, as they are now.
    """

    def __init__(
        self,
        engine: Engine,
        sampler: PopulationSampler,
        weights: Callable[[], Mapping[str, torch.Tensor]],
    ) -> None:
        self.engine = engine
        self.sampler = sampler
        self._weights = weights

    async def take(self) -> None:
        """Give the engine the weights as they are now.

        Raises:
            EngineError: It has others in the end.
        """
        await take_weights(self.engine, self._weights())


async def take_weights(engine: Engine, weights: Mapping[str, torch.Tensor]) -> None:
    """Make weights, all of the engine's search space, its centre.

    Raises:
        EngineError: It has others in the end.
    """
    taken = {name: weight.detach().float().cpu().contiguous() for name, weight in weights.items()}
    parts = (fingerprint_span(name, weight.view(-1), 0) for name, weight in taken.items())
    fingerprint = sum(parts) % MODULUS
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "weights.safetensors"
        save_file(taken, path, metadata(0, fingerprint))
        if await engine.restore([], path) != fingerprint:
            raise EngineError(f"the engine could not take the moved weights from {path}")
