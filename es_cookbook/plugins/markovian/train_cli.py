"""Train a model to write chains of thought from which alone its answers can be read.

    python -m es_cookbook.plugins.markovian.train_cli
    python -m es_cookbook.plugins.markovian.train_cli dataset.markovian=False
    python -m es_cookbook.plugins.markovian.train_cli --help

Without options it trains the bundled character-level model on sums of four digits, without a
network or GPU. For other models, use rows and prompts in words:

    ... model_name=Qwen/Qwen2.5-0.5B-Instruct dataset.source=gsm8k.parquet dataset.template=words
    sampling.max_tokens=150 dataset.answer_tokens=10
"""

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import chz

from es_cookbook.common.names import built_field
from es_cookbook.evolution.optimizers.base import OptimizerBuilder, OptimizerNames
from es_cookbook.plugins.markovian.dataset import MarkovianDatasetBuilder
from es_cookbook.rl.types import RLDatasetBuilder, SamplingParams
from es_cookbook.runs.presets import PRESETS, Preset
from es_cookbook.runs.program import HALF_KNOWN, RecipeConfig, program

_SOURCE = "github.com/scottviteri/MarkovianTraining (src/config_examples.py)"
_WORDS = {
    "dataset.template": "words",
    "optimizer": "es",
    "optimizer.population_size": "30",
    "optimizer.sigma": "0.001",
    "optimizer.learning_rate": "0.0005",
}
"""Settings for other models; the steps are those of the preset `es_at_scale`."""


def _sums(model_name: str, shape: tuple[int, int, str], lengths: tuple[int, int]) -> Preset:
    """Sums by numbers, digits and signs; `lengths` are tokens of a thought and of an answer."""
    names = ("dataset.num_terms", "dataset.num_digits", "dataset.operations")
    thought, answer = map(str, lengths)
    options = {"model_name": model_name, "sampling.max_tokens": thought, **_WORDS}
    shaped = dict(zip(names, map(str, shape), strict=True))
    return Preset({**options, **shaped, "dataset.answer_tokens": answer}, _SOURCE)


@chz.chz
class CLIConfig(RecipeConfig):
    """Train a model to think so that its answer can be read, with evolution strategies."""

    presets: ClassVar[Mapping[str, Preset]] = {
        **PRESETS,
        "82m": _sums("distilbert/distilgpt2", (6, 2, "+"), (100, 20)),
        "2.7b": _sums("microsoft/phi-2", (3, 3, "*"), (100, 50)),
        "7b": _sums("mistralai/Mistral-7B-Instruct-v0.2", (15, 2, "+"), (400, 20)),
    }

    model_name: str = str(Path(__file__).parent / "model")
    dataset: RLDatasetBuilder = built_field(MarkovianDatasetBuilder)
    optimizer: OptimizerBuilder = OptimizerNames({"es": HALF_KNOWN}).field()
    sampling: SamplingParams = built_field(SamplingParams, max_tokens=12)
    num_generations: int = 32
    eval_every: int = 4


main, cli = program("markovian", CLIConfig)

if __name__ == "__main__":
    cli()
