"""Fine-tune language models with evolution strategies: no backpropagation, only inference.

A population of genomes (seeds that stand for weight perturbations) attempts the same problems;
their rewards move the centre of the population; the whole run is a list of seeds and coefficients.

The public API is imported from here, as docs/builders/python.md lists it; all else is internal. A
name is imported when it is used, so that `import es_cookbook` costs nothing.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from es_cookbook.engines.ray.pool import RayPoolBuilder as RayPoolBuilder
    from es_cookbook.engines.torch.engine import TorchEngineBuilder as TorchEngineBuilder
    from es_cookbook.engines.vllm.engine import VLLMEngineBuilder as VLLMEngineBuilder
    from es_cookbook.evolution.optimizers.es import ES as ES
    from es_cookbook.evolution.spaces.full_rank import FullRank as FullRank
    from es_cookbook.evolution.spaces.low_rank import LowRank as LowRank
    from es_cookbook.population.evaluate import evaluate as evaluate
    from es_cookbook.population.sampler import PopulationSampler as PopulationSampler
    from es_cookbook.population.scoring import Scoring as Scoring
    from es_cookbook.rl.data.task import Task as Task
    from es_cookbook.rl.messages.message_env import MessageEnv as MessageEnv
    from es_cookbook.rl.problem_env import Grade as Grade
    from es_cookbook.rl.problem_env import ProblemEnv as ProblemEnv
    from es_cookbook.rl.types import Env as Env
    from es_cookbook.rl.types import EnvGroupBuilder as EnvGroupBuilder
    from es_cookbook.rl.types import Observation as Observation
    from es_cookbook.rl.types import RLDataset as RLDataset
    from es_cookbook.rl.types import RLDatasetBuilder as RLDatasetBuilder
    from es_cookbook.rl.types import SamplingParams as SamplingParams
    from es_cookbook.rl.types import StepResult as StepResult
    from es_cookbook.runs.config import Config as Config
    from es_cookbook.runs.program import main as main
    from es_cookbook.runs.program import run as run
    from es_cookbook.runs.recorded import open_run as open_run
    from es_cookbook.runs.tracking.jsonl import Result as Result

__version__ = "0.1.0"

_HOMES = {
    "engines.ray.pool": "RayPoolBuilder",
    "engines.torch.engine": "TorchEngineBuilder",
    "engines.vllm.engine": "VLLMEngineBuilder",
    "evolution.optimizers.es": "ES",
    "evolution.spaces.full_rank": "FullRank",
    "evolution.spaces.low_rank": "LowRank",
    "population.evaluate": "evaluate",
    "population.sampler": "PopulationSampler",
    "population.scoring": "Scoring",
    "rl.data.task": "Task",
    "rl.messages.message_env": "MessageEnv",
    "rl.problem_env": "Grade ProblemEnv",
    "rl.types": (
        "Env EnvGroupBuilder Observation RLDataset RLDatasetBuilder SamplingParams StepResult"
    ),
    "runs.config": "Config",
    "runs.program": "main run",
    "runs.recorded": "open_run",
    "runs.tracking.jsonl": "Result",
}
_MODULES = {name: module for module, names in _HOMES.items() for name in names.split()}
__all__ = [*sorted(_MODULES)]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
